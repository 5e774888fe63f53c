"""PostgreSQL as the store: one coordinator writes at a time, and a standby on another host can take over.

Open `postgres_engine` first, then `standby`.
"""
