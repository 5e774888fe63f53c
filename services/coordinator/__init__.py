"""The coordinator: versions policies, brokers their payloads, hands out work and keeps the queue of groups.

Three columns (`policy` with `lease`, `rollout`, `run`) over one store share `parts`. Decisions are pure functions and
store operations in the wings; `core` opens, holds and closes, `servicers` speak protobuf, `rpc` lets callers in; torch
stays out. Open `core` first, then `groups/queue` for a group and `versions/lineage` for a weight.
"""
