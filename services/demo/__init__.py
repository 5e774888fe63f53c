"""`heterorl demo`: a whole run on one machine, in real processes.

Open `demo_run` first, then `processes`: it starts, watches and stops each service.
"""
