"""Protobuf <-> domain values: the only border between the two, total, lossless and validating.

Three columns as in the protos: `policy_messages`, `rollout_messages`, `run_messages`; `common_messages` has what all of
them use. Open `rollout_messages` first.
"""
