"""Payloads in an S3-compatible bucket, with a bounded local cache.

Open `bucket_storage` first.
"""
