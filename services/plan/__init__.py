"""`heterorl plan`: estimated seconds, memory and bytes of a run.

Open `estimate` first. `assumptions` has the numbers that formulas use, and their sources.
"""
