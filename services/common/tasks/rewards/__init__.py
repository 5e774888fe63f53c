"""Rewards in worker processes that are killed when they take too long.

Open `worker_pool` first; `worker_main` is the program of a worker. An error is never a zero reward. `http_reward` and
`judge_reward` ask remote services from within a worker; `remote_reward` is their side in the service.
"""
