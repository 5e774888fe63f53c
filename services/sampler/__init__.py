"""The sampler: pulls versions, generates groups for leased work, spools them, delivers them.

`app` holds the loops; `sync` keeps the weights where `delay` lets them be, `rollout` makes groups, `outbox` delivers
them, `vllm` is one of two engines. Open `app` first.
"""
