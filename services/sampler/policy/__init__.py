"""Weights as the delay model allows: watched, pulled, verified, recorded, put into the engine.

A version may follow only if it descends from the one before (`descent`). Open `sync` first.
"""
