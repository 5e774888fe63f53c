"""What learner and samplers must agree on about the model, and what touches its tensors.

Contract, prompts, adapters, quantised forms, positions. Open `contract` first: what a node states about itself.
"""
