"""Joining a run with a short file: what the learner stated is adopted as far as the file's [join] section accepts it.

`asking` gets the statement, `consent` judges the task in it, `adoption` makes the configuration. Open `adoption` first.
"""
