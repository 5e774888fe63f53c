"""Models are built one at a time in a process.

While transformers builds a model it replaces functions of `torch.nn.init`, and the learner replaces one of `nn.Module`
for a model without weights. Two threads inside at once put back each other's replacement, and it stays for good:
`normal_` then writes nothing into a loaded parameter. So each thread that builds a model holds one lock.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from heterorl.common.errors import ConfigError
from heterorl.common.model.directory import first_line

BUILDING = threading.RLock()
"""Held by a thread while it builds a model or gives modules to one."""


def load_pretrained(model_dir: str, *, dtype: torch.dtype, attention: str = "") -> Any:
    """A causal language model with its weights.

    Args:
        model_dir: Hugging Face directory or hub id.
        dtype: of the parameters.
        attention: name of the implementation; empty takes the one that transformers chooses.

    Raises:
        ConfigError: it is not a causal language model, or cannot be read.
    """
    from transformers import AutoModelForCausalLM

    chosen = {"attn_implementation": attention} if attention else {}
    try:
        with BUILDING:
            return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, **chosen)
    except (OSError, ValueError) as error:
        raise ConfigError("model_dir", f"cannot load {model_dir}: {first_line(error)}") from error
