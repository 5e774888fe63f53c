"""Offline tools: check a data directory, or make one from a backup.

Open `verify` first: it checks a whole history and its payloads, and changes no file.
"""
