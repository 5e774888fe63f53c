"""Commands that follow a running run: `status`, `health`, `top` and `track`.

Open `watch_commands` first; `run_tables` and `step_curves` make its tables and curves.
"""
