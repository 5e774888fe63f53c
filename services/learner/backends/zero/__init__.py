"""DeepSpeed's ZeRO behind the same Protocol: rank 0 is the learner, the others obey its commands.

Open `backend` first; `step` is one rank's part of a step, `state` finds every piece of a parameter.
"""
