"""The caller's side of gRPC: one link, typed errors, deadlines, repeats under one key, paced bytes.

Every call ends: with an answer, with the peer's typed error, or at its deadline. Open `client` first.
"""
