"""Generation engines behind one Protocol; samplers generate with them, learners evaluate with them."""
