"""The relay: at a site with several samplers, what all of them pull crosses the line once.

Weights are answered from here and kept by content; every other call goes on to the coordinator under the name of the
node that made it. Nothing is decided here and nobody has to trust it: samplers verify as without it.
Open `app` first, then `router`, `weights` and `payloads`.
"""
