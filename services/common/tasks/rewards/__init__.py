"""Rewards in processes that are killed when they take too long: an error is never a zero reward.

Open `process` first; `worker` is what runs on the other side and imports nothing of ours. `remote` asks rewards that
others compute: `service` and `judge` run in the workers.
"""
