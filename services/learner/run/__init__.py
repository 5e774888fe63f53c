"""A learner from its start to its end: the lease, where to go on, the loop of steps, an order to go back.

Open `leader` first, then `session`; `resume` is the start after a crash, by a table.
"""
