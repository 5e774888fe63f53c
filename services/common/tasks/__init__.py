"""Prompts and verifiable rewards.

Open `task` first, then `registry`: a task by its name. Built-in tasks are scored in the caller's process, own rewards
and math-verify in processes of their own (`rewards`).
"""
