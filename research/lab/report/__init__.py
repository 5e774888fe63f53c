"""The report of an experiment: tables, pictures, and one page with both.

Open `report` first; `data` is what it reads, `drawing` is how pictures look.
"""
