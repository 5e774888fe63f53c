"""DeepSpeed's ZeRO behind the same Protocol.

Open `backend` first; `engine` hands a model over to DeepSpeed, `state` finds every piece of a parameter.
"""
