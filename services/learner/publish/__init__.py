"""From a step to a version: encode, checkpoint, upload, commit.

Open `publisher` first: at its head stand the six steps, whose order survives a crash between any two lines of it.
`step_metrics` of the folder above records each version.
"""
