"""Protobuf <-> domain values: the only conversion, total, lossless and validating.

Three columns as in the protos: `policy_messages`, `rollout_messages`, `run_messages`; `common_messages` has what all of
them use. Open `rollout_messages` first.
"""
