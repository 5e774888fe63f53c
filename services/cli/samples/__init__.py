"""`heterorl samples` and `heterorl view`: completions of a run to be read, by people and programs, and from files.

Open `command` first; `reading` walks the pages, makes text of tokens where the learner sent none and writes files;
`table` shows samples, `view` serves the page.
"""
