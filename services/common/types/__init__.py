"""Domain values that several services use: frozen, without protobuf, grpc or torch.

Three columns: `policy` (versions and payloads), `rollout` (assignments and groups), `run` (sites, reports, status);
`common` has what all of them use. Open `rollout` first.
"""
