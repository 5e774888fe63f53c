"""Statistics of paired seeds: tests, power, correlations. Pure: lists of numbers in, numbers out.

Open `significance` first, then `power`. Intervals are heterorl.common.evaluation.summary.
"""
