"""One file of a whole run, and what each way of starting its nodes needs: pure functions from run.toml to texts."""
