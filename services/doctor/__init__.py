"""`heterorl doctor`: measures what a node needs of its link and its machine, and says what to do about each lack.

Open `check` first: what a check is. `app` decides which ones a node needs; `link` and `machine` measure and judge.
"""
