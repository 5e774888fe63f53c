"""A data directory read from outside, without a running coordinator: checked, or put in another place; never changed.

Open `verify` first: what must hold of a whole history and of its payloads. `restore` makes a new data directory of a
backup.
"""
