"""`heterorl launch`: one file of a run, checked by the schema of every service and written for a launcher.

Open `command` first.
"""
