"""Several ranks that share one micro-batch: each computes a slice of its positions (Ulysses).

Open `engine` first: it makes an engine of slices out of one of whole rows, and the losses see no difference.
"""
