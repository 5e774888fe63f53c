"""Experiments: the services' own code wired in one process under a virtual clock, to see what delay does."""
