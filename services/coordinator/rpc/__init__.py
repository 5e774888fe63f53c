"""The server's side of gRPC: who may call what, how much of what, and in which order it is asked.

`door` lets a call in when there is room for it; `access` checks the certificate of each call and each message. Limits
are asked per certificate before memory is taken. Open `server` first, then `door`.
"""
