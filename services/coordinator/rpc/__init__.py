"""The server's side of gRPC: who may call what, how much of what, and in which order it is asked.

Limits are asked per certificate before memory is taken. Open `server` first, then `door`, and `access` for the table.
"""
