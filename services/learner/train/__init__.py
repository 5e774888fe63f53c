"""One optimizer step: groups to sequences, micro-batches, log-probs, the loss, the update, the numbers it leaves.

The gradient does not depend on packing, padding, micro-batches or ranks. Open `step` first, then `batch`.
"""
