"""Weights as exact integers: arena, codec, payload objects and manifests.

Open `arena` first, then `steps` and `codec`: a delta is a list of integer steps, and `compose` adds consecutive deltas
into one. `payload` is the way in for services.
"""
