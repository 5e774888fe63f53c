"""Renders one run.toml to the files of Compose, systemd, Slurm or Kubernetes.

Open `nodes` first: it turns a run into nodes. `run_file` is the schema of run.toml; `render` fills `templates`. All
functions are pure but `write_tree`.
"""
