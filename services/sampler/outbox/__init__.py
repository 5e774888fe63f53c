"""The outbox: durable groups, pushed in order, kept until their outcome.

`outbox` opens the SQLite file and makes a group durable, `turn_store` keeps turns of groups in flight, `delivery`
writes and pushes groups. Open `outbox` first.
"""
