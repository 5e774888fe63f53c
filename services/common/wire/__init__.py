"""Protobuf <-> domain values: the only border between the two, total, lossless and validating.

Three columns as in the protos: `policy`, `rollout`, `run`; what all of them use is in `common`. Open `rollout` first.
"""
