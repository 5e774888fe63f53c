"""vLLM behind the Engine Protocol: a process of its own whose weights are swapped in place.

Open `engine` first; `worker` runs inside vLLM.
"""
