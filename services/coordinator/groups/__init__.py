"""The way of a group: handed out as work, taken in, judged, queued, leased, consumed or dropped with a reason.

acked = pending + leased + consumed + dropped, always (`ledger`). Staleness is bounded four times: when work is handed
out (`schedule`), when a group comes in (`admission`), when it is leased (`horizon`) and when it is consumed. `intake`
writes a group's row; it is durable when `store/database` has committed, before its outcome is sent.

Open `queue` first. `schedule` and `deadlines` pace the `work`.
"""
