"""heterorl: reinforcement-learning post-training across data centres joined only by the Internet.

Four services (`coordinator`, `learner`, `sampler`, `relay`) use `common`; `cli` holds the commands. Open `entry` first.
The link `src/heterorl` points to this directory, so it is imported as `heterorl`.
"""

__version__ = "0.1.0"
