"""The coordinator: versions policies, brokers their payloads, hands out work and keeps the queue of groups.

Three columns (`policy`, `rollout`; the run is in `core`, `status`) over one store. Decisions are pure functions and
store operations in the wings; `core` joins them, `servicers` speak protobuf, `rpc` lets callers in; torch stays out.
Open `core` first, then `groups/queue` for a group and `versions/lineage` for a weight.
"""
