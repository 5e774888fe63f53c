"""Where bytes become durable: SQLite with one connection and group commit, and payload files by content.

An operation answers only after its bytes are on disk; a file's name exists only when all its bytes are right.
Open `database` first, then `blobs`.
"""
