"""A run's steps in experiment trackers: read from the coordinator, written by a process that the learner never sees.

Open `follow` first. `feed` says what is new, `rows` what it is called there; one file a tracker behind `tracker`.
"""
