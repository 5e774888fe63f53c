"""The demonstration: a whole run on one machine, as the operating system processes of a real one.

Open `run` first, then `processes`: how each service is started, watched and ended.
"""
