"""One file of a whole run, and what Compose, systemd, Slurm or Kubernetes start its nodes by. Pure: a run in, texts out.

Open `nodes` first; `run` is the file, `node` what it becomes, each launcher has a file.
"""
