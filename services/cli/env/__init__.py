"""`heterorl env`: an environment in the terminal, before a run plays it.

Open `command` first; `play` plays an episode, `voices` draws or asks for its turns, `show` writes it down.
"""
