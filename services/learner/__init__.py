"""The learner: takes groups, checks them, trains, publishes versions.

Below: `loss` (what is minimised), `train` (one step), `backends` (engines), `publish` (a step becomes a version),
`checks` (what is believed of a site), `run` (from start to end). `learner_app` wires. Open `run/training_loop` first.
"""
