"""Generation engines behind one Protocol; samplers generate with them, learners evaluate with them.

Open `engine` first. `hf` is the plain one; `draw` makes a token that can be drawn again. A new engine satisfies
`engine`'s Protocol and is chosen in the sampler's `config` and `assembly`. `tiny` makes a small model on the spot.
"""
