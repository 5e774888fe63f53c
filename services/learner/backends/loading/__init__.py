"""A model's weights by name, one tensor at a time: no rank holds more of them than it keeps.

Open `opened` first: a model without weights, and where these are. `tensor_file` reads files, `empty` makes models
without weights and gives them some, `streamed` computes before they have.
"""
