"""Messages <-> domain calls. Servicers decide nothing; typed errors pass through to the interceptor.

Open `services` first; `push_stream` takes groups in.
"""
