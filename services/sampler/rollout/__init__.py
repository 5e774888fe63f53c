"""From leased work to groups: swap, tokenise, generate, decode, score.

Open `generate` first: the loop.
"""
