"""A run's steps in experiment trackers: read from the coordinator, written by a process of its own.

Open `follow` first. `tracker` is the Protocol; one file a tracker behind it.
"""
