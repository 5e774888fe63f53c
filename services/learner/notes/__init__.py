"""What the learner says of groups that are kept as samples: their texts, and how far it is from who sampled them.

Open `notes` first: what is said, and when; `reading` makes text of tokens.
"""
