"""`heterorl evaluate`: scores of models or versions on held-out prompts.

Open `evaluate_sets` first. Prompts are drawn and scored as in a run (`services/sampler/prompt_evaluator.py`).
"""
