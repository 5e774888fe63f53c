"""Generation engines behind one Protocol, for samplers and evaluation.

Open `inference_engine` first: the Protocol. `hf_engine` is the reference engine. `common/model/logprobs` draws tokens;
a learner repeats the draws with it. `services/sampler/engines.py` builds the engine of the configuration.
"""
