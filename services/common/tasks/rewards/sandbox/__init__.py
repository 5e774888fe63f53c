"""What runs completions as code, inside bubblewrap: unit tests, and the verifiers of reasoning-gym.

Open `rewards` first, which asks workers: `code` gives each test of a completion's code to `bubblewrap`; `inside` runs
there. `gym` asks `serve`, which stays inside, imports reasoning-gym once and forks for each completion.
"""
