"""The relay: each payload crosses the WAN once for a place's samplers.

The relay answers calls about weights from its cache. It forwards every other call to the coordinator with the calling
node's certificate. It takes no decision and needs no trust: samplers verify everything as without it.
Open `relay_app` first, then `router`, `cached_weights` and `payloads`.
"""
