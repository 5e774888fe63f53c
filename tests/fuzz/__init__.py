"""Structured fuzzing of every decoder of bytes that another process wrote: `make fuzz N=...`."""
