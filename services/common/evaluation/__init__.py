"""Evaluation: how prompts of a set are drawn and scored, and what is said of the scores, with intervals over prompts.

Open `draws` first, then `draft` and `summary`. Samplers, the coordinator and `heterorl evaluate` share this.
"""
