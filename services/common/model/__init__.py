"""The model that learner and samplers share: contract, tensors, adapters, quantised variants, log-probs.

Open `contract` first: the settings that a node states.
"""
