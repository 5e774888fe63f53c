"""heterorl: reinforcement-learning post-training across data centres joined only by the Internet."""

__version__ = "0.1.0"
