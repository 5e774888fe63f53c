"""Offline tools: read a data directory without a coordinator, change no file.

Open `verify` first: it checks a whole history and its payloads. `restore_backup` makes a data directory from a backup.
"""
