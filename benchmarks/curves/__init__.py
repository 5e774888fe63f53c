"""Learning curves of environments of several turns; `benchmarks.environment_curves` runs them.

Open `games` for the environments, then `one_run` for the processes of a run.
"""
