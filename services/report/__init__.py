"""The report of a run, past or going on: read from its store or its coordinator, shown as one page."""
