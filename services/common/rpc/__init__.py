"""gRPC clients: one channel, typed errors, deadlines, idempotent retries, bandwidth caps.

Every call ends with an answer, with the peer's typed error, or at its deadline. Open `client` first.
"""
