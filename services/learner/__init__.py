"""The learner: takes groups, checks them, trains, publishes versions.

Below: `loss` (loss functions), `train` (one step), `backends` (engines), `publish` (from a step to a version), `checks`
(of groups), `run` (from start to end). `learner_app` wires them. Open `run/training_loop` first.
"""
