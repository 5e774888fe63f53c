"""The outbox: durable groups, pushed in order, kept until their outcome.

`outbox` makes a group durable, `turn_store` keeps turns of groups in flight, `outbox_file` opens the SQLite file of
both, `delivery` pushes. Open `outbox` first.
"""
