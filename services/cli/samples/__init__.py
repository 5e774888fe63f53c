"""`heterorl samples` and `heterorl view`: completions of a run to be read, by people and programs, and from files.

Open `command` first; `reading` walks the pages, `table` shows them, `export` writes files, `decoding` makes text of
tokens where the learner sent none, `view` serves the page.
"""
