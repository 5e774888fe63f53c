"""The gRPC server: roles of each rpc, limits by caller, refused requests.

`call_admission` admits a call when there is room; `access` checks its certificate. Limits are checked per certificate
before memory is used. Open `grpc_server` first, then `call_admission`.
"""
