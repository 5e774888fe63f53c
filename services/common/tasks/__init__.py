"""Prompts and verifiable rewards.

Open `task` first, then `registry`: a task by its name. `rewards` are computed in processes of their own.
"""
