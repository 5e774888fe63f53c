"""The ring of samples: what of the groups stays readable after they left the queue, bounded in bytes.

Open `ring` first: what is kept, and what makes room. `listing` reads.
"""
