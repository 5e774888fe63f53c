"""Engines that train: one Protocol, and everything torch behind it. `zero` divides the state over ranks.

fp32 masters; what is published is rounded from them bit for bit. Open `backend` first, then `torch`.
"""
