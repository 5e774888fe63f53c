"""Durable storage: a database with one connection and group commit, and payload files named by their content.

An operation answers only after its bytes are on disk; a file gets its name only when all its bytes are right.
`sqlite` and `postgres` are the engines. Open `database` first, then `blobs`.
"""
