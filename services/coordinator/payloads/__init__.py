"""Payloads: listed, read, kept for whom they may still serve, and deleted.

`keeper` alone deletes published payloads, by `retention`: `index` retires their rows, `store/blobs` unlinks files.
`merging` makes the deltas over many versions and deletes those itself; on a full disk the keeper deletes them too.
What `common/pull/reader` finds wrong goes out of use by `damage`. Open `keeper` first.
"""
