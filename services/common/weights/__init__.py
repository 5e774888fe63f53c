"""Weights as exact integers: arena, codec, payload objects, manifests and pull plans."""
