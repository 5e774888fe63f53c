"""A learner's run: lease, resumption, training loop, rollback.

Open `training_run` first, then `training_loop`; `resume` is the start after a crash, by a table.
"""
