"""Groups between generation and acknowledgement: durable, pushed in order, kept until their outcome is final.

`outbox` makes a group durable, `turn_store` keeps turns of groups in flight, `outbox_file` opens the SQLite file of
both, `delivery` pushes. Open `outbox` first.
"""
