"""How pictures of results are drawn: the surface, and the look of each algorithm, the same in every picture.

Open `canvas` first.
"""
