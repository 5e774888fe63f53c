"""Prompts of data sets: hub repositories at a commit, Parquet, JSONL, and weighted mixtures of any tasks.

Guarantees: rows stay in files and are read by position; what a node trains on is named by the content of those files.

Open `table` first, a task over Arrow rows; `jsonl` is one over lines; `mixture` joins several.
"""
