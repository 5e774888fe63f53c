"""The sampler: pulls versions, generates groups for leased work, spools them, delivers them.

`app` holds the loops; `policy` keeps the weights, `rollout` makes groups, `outbox` delivers them, `vllm` is one of two
engines. Open `app` first.
"""
