"""The ranks of one learner: rank 0 commands, the others obey.

Open `sharded_backend` first. `rank_env` has a rank's number and address, `rank_group` joins the ranks, `heartbeats`
ends all of them when one is gone.
"""
