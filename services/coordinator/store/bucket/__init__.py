"""Payloads in an S3-compatible bucket: it is their home, and a bounded directory has copies of what is read here.

Open `home` first.
"""
