"""Evaluation sets, and statistics of their scores.

Open `evaluation_sets` first, then `summary`. Samplers, the coordinator and `heterorl evaluate` share this.
"""
