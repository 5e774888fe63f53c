"""Environments, which answer the policy's turns from worker processes.

Open `environment` first: it is what an author writes. An error ends one episode, never its siblings.
"""
