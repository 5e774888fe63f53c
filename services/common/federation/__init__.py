"""Metrics of nodes that nobody can scrape: `series` is what is sent and shown, `push` when it is sent.

Open `series` first.
"""
