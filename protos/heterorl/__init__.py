"""heterorl: reinforcement-learning post-training across data centres. The command is `python -m heterorl`."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":
        from heterorl.launch import pin

        return pin()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
