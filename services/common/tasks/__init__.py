"""Datasets, verifiers and environments of a run.

Open `task` first, then `task_config`, which builds a task by its name. Rewards that run foreign code or parse hostile
text are computed in worker processes (`rewards`).
"""
