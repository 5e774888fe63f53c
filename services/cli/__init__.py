"""The command line: one file for each command or group of commands.

Open `main` first. A command imports what it needs when it runs, so `--help` stays fast.
"""
