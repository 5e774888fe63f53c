"""Groups between generation and acknowledgement: durable, pushed in order, kept until an outcome is final.

`outbox` makes a group durable; `spooling` tries that again while the disk is full; `spool_file` opens its SQLite file
or sets it aside; `delivery` pushes. Open `outbox` first.
"""
