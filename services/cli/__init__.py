"""Everything that a person types: one file a command, and `live` for the views of a run.

Open `main` first. What a command needs is imported when it runs, so that `--help` is instant.
"""
