"""The caller's side of gRPC: one channel, typed errors, deadlines, retries under one key, bandwidth caps.

Every call ends with an answer, with the peer's typed error, or at its deadline. Open `client` first.
"""
