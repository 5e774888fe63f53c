"""Files that Compose, systemd, Slurm or Kubernetes need to start a run, made from one run.toml.

Open `nodes` first: it turns a run into nodes. `run_file` is the schema of run.toml; `render` fills `templates`. All
functions are pure but `write_tree`.
"""
