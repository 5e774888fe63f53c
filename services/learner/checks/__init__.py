"""Checks of a group before it trains: rewards, log-probs and draws are computed again.

Open `verifier` first. `findings` says what is wrong with a group; the coordinator decides about its site.
"""
