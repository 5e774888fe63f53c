"""Structured fuzzing of every decoder of bytes that another process wrote: `make fuzz N=...`.

One core runs 30 thousand cases a second on chunks, messages and plans, 15 thousand on files, 2 thousand on checkpoints,
1 thousand on pushes.
"""
