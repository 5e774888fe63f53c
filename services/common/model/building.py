"""Models are built one at a time in a process.

While transformers builds a model it replaces functions of `torch.nn.init`, and the learner replaces one of `nn.Module`
for a model without weights. Two threads inside at once put back each other's replacement, and it stays for good:
`normal_` then writes nothing into a loaded parameter. So each thread that builds a model holds one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from heterorl.common.errors import ConfigError
from heterorl.common.model.directory import first_line
from heterorl.common.model.positions import hold_positions

BUILDING = threading.RLock()
"""Held by a thread while it builds a model or gives modules to one."""


def load_pretrained(model_dir: str, *, dtype: torch.dtype) -> Any:
    """A causal language model with its weights, all of them from the files.

    Args:
        model_dir: Hugging Face directory or hub id.
        dtype: of the parameters.

    Raises:
        ConfigError: it is not a causal language model, cannot be read, or has not all tensors.
    """
    from transformers import AutoModelForCausalLM

    # fp32 is fp32: some images of CUDA's preset TF32, which keeps 10 bits of a product's operands.
    torch.set_float32_matmul_precision("highest")
    # Shapes that differ are among what was found, by name; otherwise the error names none.
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with BUILDING:
            loader: Any = AutoModelForCausalLM
            model, found = loader.from_pretrained(model_dir, dtype=dtype, **options)
    except Exception as error:
        raise ConfigError("model_dir", f"cannot load {model_dir}: {first_line(error)}") from error
    _check_found(model_dir, found)
    hold_positions(model)
    return model


def _check_found(model_dir: str, found: Mapping[str, Any]) -> None:
    """transformers makes up what it does not find, otherwise at every start; tied tensors are not among it."""
    if mismatched := sorted(found["mismatched_keys"]):
        name, in_files, in_model = mismatched[0]
        problem = f"{name} is {list(in_files)} in the files and {list(in_model)} by config.json"
    elif missing := sorted(found["missing_keys"]):
        others = f", nor are {len(missing) - 1} others" if len(missing) > 1 else ""
        problem = f"{missing[0]} is not in the files of {model_dir}{others}"
    else:
        return
    raise ConfigError("model_dir", problem, action="copy the directory again, or name a whole causal language model")
