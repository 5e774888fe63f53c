"""`heterorl evaluate`: a model, or versions of a run, on sets of held-out prompts, on this machine.

Open `run` first. Draws, scores and intervals are those of a run's own evaluations (`services/common/evaluation`).
"""
