"""A version's weights divided among the ranks: rounded, compared and coded by all of them, chunk by chunk.

Open `divided` first; `exchange` says who sends which elements to whom.
"""
