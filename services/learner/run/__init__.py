"""A learner from its start to its end: the lease, where to go on, the loop of steps, an order to go back.

Open `training_run` first, then `training_loop`; `resume` is the start after a crash, by a table.
"""
