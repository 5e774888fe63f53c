"""Datasets: hub repositories at a commit, Parquet, JSONL, weighted mixtures.

Open `rows_task` first, a task over rows; `row_reader` reads one row of any file, `arrow_rows` and `json_lines` hold
them, `mixture` joins tasks. Rows are read by number. A task's digest is of the content of its files.
"""
