"""The process and its machine: configuration, clock, logs, metrics, files, threads.

These modules do not know policies or groups. Open `config_file` first: one TOML file a service; errors name the key.
"""
