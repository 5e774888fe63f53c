"""The report of a run, past or going on: read from its store or its coordinator, shown as one page.

Open `past_run` first: what a report knows and where it is from. `page` draws it with `figures`.
"""
