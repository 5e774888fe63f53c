"""The coordinator: keeps versions and payloads, leases prompts, queues groups.

Each `*_column` module implements one part of `common/api.py` over one store; all of them share `context`. Decisions are
pure functions in the subfolders. `core` opens, holds and closes everything; `servicers` translate protobuf; `rpc`
admits calls. No module imports torch. Open `core` first, then `groups/queue` for a group and `versions/lineage` for a
version.
"""
