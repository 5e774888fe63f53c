"""The sampler: pulls versions, generates groups for leased work, delivers them.

`sampler_app` holds the loops; `weight_sync` pulls what `delay` lets through, `rollout` makes groups, `outbox` delivers
them. Open `sampler_app` first.
"""
