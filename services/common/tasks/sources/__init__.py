"""Datasets: hub repositories at a commit, Parquet, JSONL, weighted mixtures.

Open `arrow_dataset` first, a task over Arrow rows; `jsonl` is one over lines; `mixture` joins several. Rows stay in
files and are read by position. A task's digest is of the content of its files.
"""
