"""Payloads at addresses that a coordinator gives: which of them a node asks, how it reads from them and puts there.

Open `reads`.
"""
