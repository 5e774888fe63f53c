"""A run's steps in experiment trackers: read from the coordinator, written by a process of its own.

Open `follow` first. `step_feed` reads what is new, `tracker_rows` names it; one file a tracker behind `tracker`.
"""
