"""The device of a rank: the GPU of its number on its machine."""

from __future__ import annotations

import torch

from heterorl.learner.backends.ranks.place import Place


def rank_device(kind: str, place: Place) -> torch.device:
    """`cpu`, or `cuda:LOCAL_RANK`."""
    return torch.device("cpu" if kind == "cpu" else f"cuda:{place.local_rank}")


def missing_device(kind: str, place: Place) -> str:
    """What is wrong with it; empty where nothing is."""
    if kind == "cpu" or place.local_rank < torch.cuda.device_count():
        return ""
    return f"rank {place.rank} has no {rank_device(kind, place)}: its machine shows {torch.cuda.device_count()} GPUs"
