"""Payloads: which are kept, verified, merged, backed up and deleted.

`garbage_collector` deletes published payloads as `retention` decides: `payload_index` removes their rows, `store/blobs`
their files. `delta_merger` makes deltas over many versions, `merged_deltas` caches them. `damage` takes payloads that
`common/pull/payload_reader` found damaged out of use. Open `garbage_collector` first.
"""
