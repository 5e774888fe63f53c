"""The loss as a value of parts: importance weight, clip, advantage, aggregation; twenty algorithms in one table.

Pure functions of tensors whose names carry their shape. Open `rule` first; the group expectation of GEPO is in
`denominators`.
"""
