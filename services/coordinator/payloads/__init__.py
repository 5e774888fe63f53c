"""Payloads: listed, read, kept for whom they may still serve, and deleted by one keeper alone.

Only `keeper` deletes, by `retention`, after rows say so. `reader` proves each block before it leaves; what is found
wrong goes out of use by `damage`. `merging` makes the deltas over many versions. Open `keeper` first.
"""
