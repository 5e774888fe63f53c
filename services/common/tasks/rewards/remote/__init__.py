"""Rewards that others compute: services that are asked over HTTP, and language models that judge.

Open `reward` first, which asks; `service` and `judge` run in the worker processes. A learner cannot compute such a
reward again: it believes a signature (`proof`) or a site that it is told to trust.
"""
