"""Payloads: listed, read, kept for whom they may still serve, and deleted.

`keeper` alone deletes published payloads, by `retention`: `index` retires their rows, `store/blobs` unlinks files.
`composer` makes deltas over many versions, and `merges` keeps and deletes those. `damage` takes out
of use what `common/pull/payload_reader` finds wrong. Open `keeper` first.
"""
