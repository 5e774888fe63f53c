"""Datasets: hub repositories at a commit, Parquet, JSONL, weighted mixtures.

Open `rows_task` first, a task over rows; `row_reader` reads one row of any file and holds JSON lines, `arrow_rows`
holds others, `mixture` joins tasks. Rows are read by number. A task's digest is of the content of its files.
"""
