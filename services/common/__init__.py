"""What two services need: values, wire, processes, identity, calls, weights, model, tasks, generation, pulls.

A room stands here because two services use it; a test counts them. Open `api.py` first: the coordinator as its callers
see it. `errors.py` is the tree of everything that can be refused, with the next move in every message.
"""
