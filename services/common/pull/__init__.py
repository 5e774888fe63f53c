"""Pulls of weights: plan, fetch, apply to a staging copy, verify.

A fetch resumes at every byte. Digests prove bytes, a signature proves a version, a root proves a state. Open `puller`
first. `payload_reader` is the other end: coordinator and relay read with it what they send.
"""
