"""Losses as values of parts; all algorithms in one table.

Pure functions of tensors whose names carry their shape. Open `loss_spec` first: the table of algorithms, and the step
from a configuration to its parts; then `policy_loss`. The group expectation of GEPO is in `group`. A new algorithm is a
class in `loss_config`, its name in the union there, and a row in `loss_spec`.
"""
