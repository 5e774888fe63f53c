"""Generation engines behind one Protocol: samplers generate with them, learners evaluate with them.

Open `inference_engine` first: the Protocol. `hf_engine` is the reference engine. `token_sampling` draws tokens, also so
that a learner can draw them again. The sampler's `config` and `assembly` choose the engine.
"""
