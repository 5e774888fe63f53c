"""Weights as exact integers: arena, codec, payload objects, manifests and pull plans.

Open `arena` first, then `steps` and `codec`: a delta is a list of integer steps. `payload` is the way in for services.
"""
