"""Several processes that train one model: rank 0 is the learner, the others obey its commands.

Open `sharded_backend` first. `rank_env` has a rank's number and address, `rendezvous` joins the ranks, `heartbeats`
ends all of them when one is gone.
"""
