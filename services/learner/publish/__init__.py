"""A step becomes a version: encoded against what samplers hold, written, uploaded, committed, signed.

Open `publisher` first: at its head stand the six steps, whose order survives a crash between any two lines of it.
`training_log` is for people and plots only.
"""
