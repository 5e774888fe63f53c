"""Experiments: the services' own code wired in one process under a virtual clock, to see what delay does.

Open `cell` first, one run of an experiment, then `world`: services, links and clock. `run` spreads cells over workers;
`experiments/` holds the configurations that come with heterorl.
"""
