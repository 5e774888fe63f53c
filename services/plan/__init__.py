"""`heterorl plan`: estimates seconds, memory and bytes of a run from a few numbers. All functions are pure.

Open `estimate` first. `model_shape` counts parameters, `costs` has the formulas, `assumptions` the numbers they use and
their sources.
"""
