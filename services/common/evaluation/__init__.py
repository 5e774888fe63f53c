"""Evaluation: which sets there are and how they are drawn, and what is said of the scores, with intervals over prompts.

Open `config` first, then `summary`. Samplers, the coordinator and `heterorl evaluate` share this.
"""
