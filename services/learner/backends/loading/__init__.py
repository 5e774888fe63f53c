"""A model's weights by name, one tensor at a time: no rank holds more of them than it keeps.

Open `opened` first: a model without weights, and where these are. `shards` reads the files of a model directory,
`tensor_file` one file, `empty` makes models without weights and gives them some, `streamed` computes before they have.
"""
