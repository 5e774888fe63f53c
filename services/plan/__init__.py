"""`heterorl plan`: estimated seconds, memory and bytes of a run.

Open `estimate` first. `model_shape` counts parameters, `assumptions` has the numbers that formulas use, and
their sources.
"""
