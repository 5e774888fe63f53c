"""Weights on their way from an arena to vLLM: files in a directory that only this user can read.

    all weights   one safetensors file, read by every worker's `load_arena_file`; or a whole model, to start from
    adapters      a directory as `peft` writes it, read by vLLM's own loader of adapters, over the base model

Guarantees: no pickle; what was written is gone after `clear`. Must never import vllm.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.model.adapters import PARTS
from heterorl.common.process.files import replacing
from heterorl.common.types.common import LoraSettings
from heterorl.common.weights.arena import Arena, Dtype, Layout
from heterorl.common.weights.file_plan import FilePlan
from heterorl.sampler.vllm.private_directory import PrivateDirectory
from heterorl.sampler.vllm.process import VllmProcess

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for."""
_TYPES: dict[Dtype, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8_e4m3": "F8_E4M3", "int8": "I8"}
_PEFT = dict(zip(PARTS, ("lora_A", "lora_B"), strict=True))


class WeightsOnTheWay:
    """Files of one version at a time."""

    def __init__(self, model: Any, *, model_dir: str, layout: Layout, lora: LoraSettings, parent: Path) -> None:
        self._config = model.config
        self._model_dir = model_dir
        self._layout = layout
        self._lora = lora
        self.names = [spec.name for spec in layout.specs] if lora.rank else stored_names(layout, _derived(model))
        # Readable by this user alone; a whole model that a killed process left is not there for ever.
        self._private = PrivateDirectory(parent, prefix="weights")
        self.directory = self._private.path
        self._file = self.directory / ("adapter_model.safetensors" if lora.rank else "model.safetensors")

    def arguments(self) -> dict[str, Any]:
        """What vLLM must know of adapters when it starts.

        Raises:
            ConfigError: it makes room for no adapters of this rank.
        """
        if not self._lora.rank:
            return {}
        return {
            "enable_lora": True,
            "max_lora_rank": _room(self._lora.rank),
            "max_loras": 1,
            "max_cpu_loras": 1,
            # Elsewhere vLLM would put empty adapters; over the output layer they fail on log-probs of prompts on a CPU.
            "lora_target_modules": list(self._lora.target_modules),
        }

    def write(self, arena: Arena) -> int:
        """Write a version's file; returns its bytes."""
        if not self._lora.rank:
            return write_weights(arena, self._file, names=self.names)
        settings = {
            "peft_type": "LORA", "r": self._lora.rank, "lora_alpha": self._lora.alpha, "bias": "none",
            "target_modules": list(self._lora.target_modules),
        }  # fmt: skip
        (self.directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return write_weights(arena, self._file, names=self.names, rename=_peft_name)

    def swap(self, process: VllmProcess, label: str) -> None:
        """Put what was written in place of what a process computes with.

        Raises:
            EngineDied: it does not do it, or not wholly.
        """
        if self._lora.rank:
            process.swap_adapter(str(self.directory), label=label)
            return
        owners = {self._layout.spec(name).name: name for name in self.names}
        aliases = {
            spec.name: owners[spec.alias_of or spec.name]
            for spec in self._layout.specs
            if spec.name != owners[spec.alias_of or spec.name]
        }
        process.swap("load_arena_file", str(self._file), aliases, num_tensors=len(self.names), label=label)

    @contextmanager
    def whole_model(self) -> Iterator[str]:
        """A model directory to start a process from: of the version written, or the base under the adapters."""
        if self._lora.rank:
            yield self._model_dir
            return
        # One for each process that starts: the file is the same, by a second name.
        directory = Path(tempfile.mkdtemp(prefix="model-", dir=self.directory))
        try:
            self._config.save_pretrained(directory)
            (directory / "model.safetensors").hardlink_to(self._file)
            yield str(directory)
        finally:
            shutil.rmtree(directory)

    def clear(self) -> None:
        """Delete the version's file."""
        self._file.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete the directory."""
        self._private.close()


def write_weights(
    arena: Arena, path: Path, *, names: Sequence[str], rename: Callable[[str], str] = lambda name: name
) -> int:
    """Write tensors of an arena as a safetensors file, without a second copy of them in memory.

    Only this user may read the file, which appears complete or not at all.

    Args:
        arena: the weights.
        path: the file, replaced if it is there.
        names: the tensors; of tied ones the name to store them under (`stored_names`).
        rename: from a tensor's name to that in the file.

    Returns:
        Size of the file, bytes.
    """
    specs = [arena.layout.spec(name) for name in names]
    plan = FilePlan([(rename(name), _TYPES[spec.dtype], spec.shape) for name, spec in zip(names, specs, strict=True)])
    with replacing(path, is_durable=False, mode=0o600) as file:
        file.write(plan.header)
        for name in names:
            values = arena.view(name)
            file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).data)
    return plan.num_bytes


def stored_names(layout: Layout, is_derived: Callable[[str], bool]) -> list[str]:
    """One name for each storage: of tied tensors the first that is not derived from another, as checkpoints have it.

    Args:
        layout: the tensors.
        is_derived: whether a model makes the tensor of this name out of another one.
    """
    chosen: dict[str, str] = {}
    for spec in layout.specs:
        owner = spec.alias_of or spec.name
        if owner not in chosen or is_derived(chosen[owner]):
            chosen[owner] = spec.name
    return sorted(chosen.values())


def _room(rank: int) -> int:
    room = [larger for larger in LORA_RANKS if larger >= rank]
    if not room:
        raise ConfigError("lora.rank", f"vLLM takes adapters up to rank {LORA_RANKS[-1]}")
    return room[0]


def _peft_name(name: str) -> str:
    module, _, part = name.rpartition(".")
    return f"base_model.model.{module}.{_PEFT[part]}.weight"


def _derived(model: Any) -> Callable[[str], bool]:
    """Whether transformers ties the tensor of a name to another one; its table holds names, or patterns of names."""
    tied = list(getattr(model, "_tied_weights_keys", None) or ())
    return lambda name: any(re.fullmatch(pattern, name) for pattern in tied)
