"""Evaluations: planned when a version is published, handed out as work, counted once, summed up; store operations.

Open `jobs` first. Nothing here ever makes a publication or a learner wait.
"""
