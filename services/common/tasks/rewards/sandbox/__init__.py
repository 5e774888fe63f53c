"""Sandboxes (bubblewrap) for unit tests and reasoning-gym's verifiers.

Open `code_reward` first: it runs each test in `bubblewrap`, where `sandbox_main` is the program. `gym_reward` keeps one
`gym_server` in a sandbox, which imports reasoning-gym once and forks for each completion.
"""
