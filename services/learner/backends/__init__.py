"""Engines that train: one interface; torch, FSDP2 and ZeRO behind it.

fp32 masters; what is published is rounded from them bit for bit. Open `train_backend` first, then `torch_backend`.
"""
