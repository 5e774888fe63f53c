"""Checks of groups before training: rewards, log-probs and draws, computed again.

Open `verifier` first. `findings` says what is wrong with a group; the coordinator decides about its site.
"""
