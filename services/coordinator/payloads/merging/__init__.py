"""Merged deltas: one payload instead of many, for samplers that are far behind. A cache, deletable at any time.

`composer` decides what is made and when, `spans` which are worth it; the sum itself is `common/weights/compose`, exact
in integer steps. Nothing is served that was not proved against the manifests. Open `composer` first.
"""
