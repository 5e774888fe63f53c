"""The model of learner and samplers: contract, tensors, adapters, variants, log-probs.

Open `contract` first: the settings that a node states.
"""
