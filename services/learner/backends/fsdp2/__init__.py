"""torch's own fully sharded data parallelism, `fully_shard`, behind the same Protocol.

Open `backend` first; `sharding` cuts a model into its ranks' pieces, `state` reads and writes them,
`reference` opens what a loss compares with.
"""
