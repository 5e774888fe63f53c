"""`heterorl demo`: a whole run on one machine, as the processes of a real one.

Open `demo_run` first, then `processes`: it starts, watches and stops each service.
"""
