"""Environments: what answers the policy's turns, in processes that are killed when they take too long.

Open `environment` first: it is what an author writes. An error is the ending of one episode, never of its siblings.
"""
