"""What the paper and the README say, as tests that results answer: shown, contradicted, not shown or not tested.

Open `claim` first, then `declared`, the table of all claims. No verdict is written by hand.
"""
