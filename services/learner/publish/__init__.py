"""A step becomes a version: encoded against what samplers hold, written, uploaded, committed, signed.

The order survives a crash between any two lines of it. Open `publish` first.
"""
