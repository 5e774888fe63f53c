"""What every process of ours needs of its machine: configuration, clock, logs, metrics, files, threads.

Nothing here knows a policy or a group. Open `config` first: one TOML file a service, refused by key.
"""
