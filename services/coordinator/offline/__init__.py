"""Tools that read a data directory without a running coordinator and never change it.

Open `verify` first: it checks a whole history and its payloads. `restore_backup` makes a data directory from a backup.
"""
