"""Losses as values of parts; an algorithm is one class of `loss_config`.

Pure functions of tensors whose names carry their shape. Open `loss_spec` first: all parts, and the step from a
configuration to its parts; then `policy_loss`. The group expectation of GEPO is in `group`. A new algorithm is a class
in `loss_config`, and its name in the union there.
"""
