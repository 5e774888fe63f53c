"""`heterorl plan`: estimated seconds, memory and bytes of a run.

Open `estimate` first. `model_shape` counts parameters, `costs` has the formulas, `assumptions` the numbers they use and
their sources.
"""
