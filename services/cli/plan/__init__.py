"""`heterorl plan`: what a model, GPUs and a link come to, as a table or as JSON.

Open `command` first; `amounts` reads and writes amounts with units, `table` draws.
"""
