"""Intervals of means and shares, for whoever states a number with its uncertainty. Pure: lists of numbers in, numbers
out.
"""
