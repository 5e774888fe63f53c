"""One optimizer step: batch, micro-batches, log-probs, loss, update, report.

The gradient does not depend on packing, padding, micro-batches or ranks. Open `step` first, then `batch`.
"""
