"""Payloads in an S3-compatible bucket, and a bounded cache of them in the data directory.

Open `bucket_storage` first.
"""
