"""Merged deltas: one payload instead of many, for samplers that are far behind. A cache, deletable at any time.

A merged delta is the exact sum of integer steps; nothing is served that was not proved against the manifests.
Open `composer` first; `spans` decides which are worth making.
"""
