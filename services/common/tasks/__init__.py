"""Prompts and verifiable rewards.

Open `task` first, then `registry`: a task by its name. `scoring` scores a group: built-in tasks in the caller's
process, own rewards and math-verify in processes of their own (`rewards`).
"""
