"""A step becomes a version: encoded against what samplers hold, written, uploaded, committed, signed.

Open `publish` first: at its head stand the six steps, whose order survives a crash between any two lines of it.
`journal` is for people and plots only.
"""
