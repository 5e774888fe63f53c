"""Evaluation at a site: parts of held-out sets drawn with a pinned version, beside rollouts.

Open `work` first; `drawing` asks the engine, `sets` loads the tasks.
"""
