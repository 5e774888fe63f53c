"""Evaluations: planned when a version is published, handed out in parts, counted once, summed up; store operations.

Open `plan` first, then `choice`, `parts` and `results`. Nothing here ever makes a publication or a learner wait.
"""
