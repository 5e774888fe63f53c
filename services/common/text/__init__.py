"""Text and token ids: a run's tokenizer and template, the tokens between turns, and what a turn says.

Open `prompts` first. Guarantees: every node writes the same ids of the same messages, and no drawn id is written again.
"""
