"""Messages <-> domain calls. Servicers decide nothing; typed errors pass through to the interceptor.

One servicer for each column, which takes that column. Open `rollout` first.
"""
