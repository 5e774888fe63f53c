"""heterorl: reinforcement-learning post-training across data centres joined only by the Internet.

Three services, `coordinator`, `learner`, `sampler`, over `common`; `cli` is what a person types. Open `entry` first.
This directory is imported as `heterorl`: `src/heterorl` is a link to it.
"""

__version__ = "0.1.0"
