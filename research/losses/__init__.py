"""Losses that the lab has tried and that do not ship with heterorl: each is a custom loss, docs/own-losses.md.

Open `kinds` first: the names under which experiments know them. A learner takes one by
`loss = {kind = "custom", function = "heterorl_research.losses.gepo_tempered:loss"}` and the keys that `kinds` has.
"""
