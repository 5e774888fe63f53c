"""gRPC servicers: translate messages to calls of the columns.

One servicer for each column. Typed errors pass through to the interceptor. Open `rollout_servicer` first.
"""
