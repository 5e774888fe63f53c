"""`heterorl samples`: completions of a run to be read on a terminal, by programs, and from files.

Open `command` first; `reading` walks the pages, `table` shows them, `export` writes files, `decoding` makes text of
tokens where the learner sent none.
"""
