"""A run on paper: seconds, memory and bytes of a learner before anybody rents it. Pure: numbers in, numbers out.

Open `plan` first; `shape` counts parameters, `costs` has bytes and seconds, `assumptions` says what is taken for
granted, and where each number is from.
"""
