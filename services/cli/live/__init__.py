"""A run as it is now, for people and programs: `status`, `top` and `track`.

Open `watch` first; `tables` and `curves` are what it shows.
"""
