"""Unit tests of a completion's code, each in a process of its own inside bubblewrap.

Open `code` first: it takes the code out of a completion and gives each test to `bubblewrap`; `inside` runs there.
"""
