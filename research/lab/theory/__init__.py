"""The page about the theory: what is proved of GEPO's weights, what is measured, and what is false.

Open `claims` first.
"""
