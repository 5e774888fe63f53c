"""Durable storage: a database with group commit, and content-addressed payload files.

An operation answers only after its bytes are on disk; a file gets its name only when all its bytes are right.
`sqlite` and `postgres` are the engines. Open `database` first, then `blobs`. With a bucket, `bucket_storage` has the
payloads and `bucket_cache` bounds their copies.
"""
