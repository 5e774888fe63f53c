"""What runs completions as code, inside bubblewrap: unit tests, and the verifiers of reasoning-gym.

Open `code` first: it takes the code out of a completion and gives each test to `bubblewrap`; `inside` runs there.
`gym` asks `serve`, which stays inside, imports reasoning-gym once and forks for each completion; `entries` are both's.
"""
