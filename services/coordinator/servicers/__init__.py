"""gRPC servicers: translate messages to calls of the columns.
Typed errors pass through to the interceptor.

One servicer for each column. Open `rollout_servicer` first.
"""
