"""The way of a group: handed out as work, taken in, judged, queued, leased, consumed or dropped with a reason.

acked = pending + leased + consumed + dropped, always (`ledger`). Staleness is bounded by pacing (`schedule`) and by age
(`ages`, `horizon`); what nobody answers runs out (`deadlines`). Open `queue` first.
"""
