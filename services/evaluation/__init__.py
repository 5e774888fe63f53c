"""`heterorl evaluate`: a model, or versions of a run, on sets of held-out prompts, on this machine.

Open `evaluate_sets` first. Prompts are drawn and scored as in a run (`services/sampler/prompt_evaluator.py`).
"""
