"""A group's life: assigned, received, validated, queued, leased, consumed or dropped.

acked = pending + leased + consumed + dropped, always (`ledger`). Staleness is bounded four times: when work is handed
out (`schedule`), when a group arrives (`validation`), when it is leased (`queue`) and when it is consumed. `intake`
writes a group's row and answers after the commit of `store/database`.

Open `queue` first. `schedule` paces `work_assignments`.
"""
