"""A run as it is now, for people and programs: `status`, `top`, and the one look that both take.

Open `watch` first.
"""
