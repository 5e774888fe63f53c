"""Payloads in an S3-compatible bucket, with a bounded cache in the data directory.

Open `bucket_storage` first.
"""
