"""One checkpoint of all ranks: the files of the torch backend, each rank's pieces at their places in them.

Guarantees: either backend continues the other's run, at any number of ranks; memory for one tensor or piece at a time,
and for a copy of the rank's share where it is written beside the next step. Open `write` first; `beside` does the same
in a thread, `read` is the way back.
"""
