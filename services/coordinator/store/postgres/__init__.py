"""PostgreSQL as the store: the same operations by one writer at a time, whose place another host can take.

Open `engine` first, then `standby`.
"""
