"""A small model that is made on the spot: its architecture, its tokenizer, and a short supervised run on a task.

Open `model` first, then `warm_start`. Demonstration, experiments, benchmarks and tests begin with it.
"""
