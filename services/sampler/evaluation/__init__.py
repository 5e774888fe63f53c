"""Evaluation at a site: held-out prompts drawn with the version that the engine has, beside rollouts.

Open `work` first; `drawing` loads the tasks and asks the engine.
"""
