"""One file of a whole run, and what Compose, systemd, Slurm or Kubernetes start its nodes by. Pure: run in, texts out.

Open `nodes` first; `run` is the file, `render` fills the launchers' `templates`.
"""
