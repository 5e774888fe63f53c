"""Statistics of paired seeds: intervals, tests, power, correlations. Pure: lists of numbers in, numbers out.

Open `intervals` first, then `significance` and `power`.
"""
