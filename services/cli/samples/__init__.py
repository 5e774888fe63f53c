"""The commands `heterorl samples` and `heterorl view`.

Open `samples_commands` first. `sample_reader` reads pages, decodes tokens and writes export files; `sample_table` shows
samples on a terminal; `view_command` serves the page.
"""
