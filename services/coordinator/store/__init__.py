"""Where bytes become durable: one connection and group commit, and payload files by content.

An operation answers only after its bytes are on disk; a file's name exists only when all its bytes are right.
`sqlite` and `postgres` are the engines. Open `database` first, then `blobs`.
"""
