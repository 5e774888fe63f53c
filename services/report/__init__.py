"""The report of a run, past or going on: read from its store or its coordinator, shown as one page.

Open `past_run` first: what a report knows. `files` and `live` are its two sources, `page` draws it with `figures`.
"""
