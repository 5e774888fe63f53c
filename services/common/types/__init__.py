"""Domain values that cross borders between services: frozen, without protobuf, grpc or torch.

Three columns: `policy` (versions and their payloads), `rollout` (work and groups), `run` (sites, reports, status); what
all of them use is in `common`. Open `rollout` first: a group is what travels.
"""
