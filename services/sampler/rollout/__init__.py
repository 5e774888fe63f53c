"""Rollouts: leased work is generated, scored and put into the outbox.

Open `generation_loop` first.
"""
