"""A step becomes a version: encoded against what samplers hold, written, uploaded, committed, signed.

The order survives a crash between any two lines of it; its six steps stand at the head of `publish`, the file to open
first. `journal` is for people and plots only.
"""
