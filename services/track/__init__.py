"""A run's steps and evaluations in experiment trackers, by a separate process.

It reads them from the coordinator. Open `follow` first. `tracker` is the Protocol; one file a tracker behind it.
"""
