"""Payloads: listed, read, kept for whom they may still serve, and deleted.

`keeper` alone deletes published payloads, by `retention`: `index` retires their rows, `store/blobs` unlinks files.
`composer` makes deltas over many versions, and `merges` keeps and deletes those. What `common/pull/reader` finds wrong
goes out of use by `damage`. Open `keeper` first.
"""
