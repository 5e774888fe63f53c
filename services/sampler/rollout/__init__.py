"""Leased work becomes groups: the engine generates, rewards score, the outbox takes each group.

Open `generation_loop` first.
"""
