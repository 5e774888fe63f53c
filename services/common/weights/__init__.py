"""Weights as exact integers: arena, codec, payload files and manifests.

Open `arena` first, then `sparse_codec` and `codec`: a delta is a list of integer steps, and `compose` adds consecutive
deltas into one. Services use `payload`.
"""
