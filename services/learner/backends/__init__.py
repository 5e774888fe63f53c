"""Engines that train: one Protocol, and everything torch behind it. `fsdp2` and `zero` divide it.

fp32 masters; what is published is rounded from them bit for bit. Open `train_backend` first, then `torch_backend`.
"""
