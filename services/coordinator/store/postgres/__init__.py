"""PostgreSQL as the store: one coordinator writes, a standby can take over.

Open `postgres_engine` first, then `standby`.
"""
