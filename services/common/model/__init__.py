"""What learner and samplers must agree on about the model, and what touches its tensors.

Contract, prompts, canary, adapters, quantised forms. Open `contract` first: what a node states about itself.
"""
