"""Protobuf <-> domain values: the only border between the two, total, lossless and validating.

Three columns as in the protos: `policy`, `rollout`, `run`; `common` has what all of them use. Open `rollout` first.
"""
