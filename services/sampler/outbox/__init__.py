"""Groups between generation and acknowledgement: durable, pushed in order, kept until an outcome is final.

`outbox` makes a group durable, and tries that again while the disk is full; `turns` keeps those of groups under way;
`spool_file` opens the SQLite file of both or sets it aside; `delivery` pushes. Open `outbox` first.
"""
