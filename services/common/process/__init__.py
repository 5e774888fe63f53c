"""The process and its machine: configuration, clock, logs, metrics, files, threads.

Nothing here knows a policy or a group. Open `config_file` first: one TOML file a service; errors name the key.
"""
