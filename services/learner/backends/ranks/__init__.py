"""Several processes that train one model: rank 0 is the learner, the others obey its commands.

Open `backend` first; `place` says who is who, `meeting` brings them together, `watch` ends all when one is gone.
"""
