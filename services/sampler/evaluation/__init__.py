"""Evaluation at a site: held-out prompts drawn with the version that the engine has, beside rollouts.

Open `work` first; `drawing` asks the engine, `sets` loads the tasks.
"""
