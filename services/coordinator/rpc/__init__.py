"""The gRPC server: who may call which rpc, how many calls and bytes each caller gets, and which requests are refused.

`call_admission` admits a call when there is room; `access` checks its certificate. Limits are checked per certificate
before memory is used. Open `grpc_server` first, then `call_admission`.
"""
