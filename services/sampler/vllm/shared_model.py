"""Reference model and weight files, shared by a node's vLLM engines.

    all weights   one safetensors file, read by every worker's `load_arena_file`; or a whole model, to start from
    adapters      a directory in the format of `peft`, read by vLLM's own loader, over the base model

Files lie in a directory of this process that only this user can read:

    PARENT/PREFIX-xxxx/      the directory
    PARENT/PREFIX-xxxx.lock  locked while its owner lives; the kernel releases it when the process ends

A version's file is written once for all engines that load it within one `written`, then deleted. The next start deletes
directories of killed processes, but only those with a lock file. No pickle. This module must never import vllm.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.model import tensors
from heterorl.common.model.adapters import PARTS, attach, base_digest
from heterorl.common.model.contract import ALL_WEIGHTS, LoraConfig
from heterorl.common.model.model_directory import config_of
from heterorl.common.model.model_loading import load_pretrained, token_limits_of, window_of
from heterorl.common.process.files import replacing, try_lock
from heterorl.common.types.common import Digest, Float32Array, Int32Array, LoraSettings, SamplingSemantics
from heterorl.common.weights.arena import Arena, Dtype, Layout
from heterorl.common.weights.safetensors_layout import SafetensorsLayout
from heterorl.sampler.sampler_config import adapter_room
from heterorl.sampler.vllm.vllm_process import VllmProcess
from heterorl.sampler.vllm.weight_canary import Reference

_TYPES: dict[Dtype, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8_e4m3": "F8_E4M3", "int8": "I8"}
_PEFT = dict(zip(PARTS, ("lora_A", "lora_B"), strict=True))
LOCK = ".lock"


class SharedModel:
    """One for each node, for all of its engines."""

    def __init__(
        self,
        *,
        model_dir: str,
        published_dtype: Dtype,
        sampling: SamplingSemantics,
        weights_dir: Path,
        lora: LoraConfig = ALL_WEIGHTS,
        swap_check_device: str = "cpu",
    ) -> None:
        """Load the model on the CPU; the reference keeps no own weights.

        Raises ConfigError: the model cannot be loaded.
        """
        self.model_dir = model_dir
        self.sampling = sampling
        self._swap_check_device = swap_check_device
        self.model = load_pretrained(model_dir, dtype=tensors.TORCH_DTYPE[published_dtype]).eval()
        self.room = token_limits_of(self.model.config)
        self.lora = lora.settings(base_digest(self.model) if lora.is_on else Digest(""))
        if self.lora.rank:
            attach(self.model, self.lora)
        self.layout = tensors.layout_of(self.model, published_dtype)
        self.weights = WeightFiles(
            self.model, model_dir=model_dir, layout=self.layout, lora=self.lora, parent=weights_dir
        )
        self._reference: Reference | None = None
        # Guards the file and the number of its readers.
        self._writing = threading.Lock()
        self._num_readers = 0
        # Guards the reference and its answers for the current version.
        self._computing = threading.Lock()
        self._known: dict[tuple[object, ...], list[Float32Array]] = {}

    def base(self) -> Arena | None:
        """Weights of model_dir in the published type; None after a load."""
        if self._reference is not None:
            return None
        arena = Arena(self.layout)
        tensors.store(self.model, arena)
        return arena

    @contextmanager
    def written(self, arena: Arena) -> Iterator[None]:
        """The version's file, from the first reader's entry to the last's exit."""
        with self._writing:
            if not self._num_readers:
                self._reference = self._reference or Reference(self.model, self.layout, device=self._swap_check_device)
                self._known = {}
                try:
                    self.weights.write(arena)
                except BaseException:
                    self.weights.clear()
                    raise
            self._num_readers += 1
        try:
            yield
        finally:
            with self._writing:
                self._num_readers -= 1
                if not self._num_readers:
                    self.weights.clear()

    def expected(self, arena: Arena, sequences: Sequence[Int32Array], starts: Sequence[int]) -> list[Float32Array]:
        """The reference's log-probs within `written`, computed once for equal draws."""
        assert self._reference is not None
        name = (*starts, *(sequence.tobytes() for sequence in sequences))
        with self._computing:
            if name not in self._known:
                self._known[name] = self._reference.logprobs(arena, sequences, starts, self.sampling)
            return self._known[name]

    def longest(self, wanted: int) -> int:
        """Tokens of prompt and completion together: `wanted`, else the model's limit.

        Raises ConfigError: vLLM would compute other positions than the learner.
        """
        window = window_of(self.model.config)
        if window and window.kind != "longrope":
            problem = f"vLLM computes rotary positions of type {window.kind} otherwise than the learner"
            raise ConfigError("engine.kind", problem, action='set it to "hf"')
        if window and wanted > window.tokens:
            raise ConfigError("engine.max_model_len", str(window), action=f"set {window.tokens} or less")
        if not (wanted or self.room.positions):
            raise ConfigError("engine.max_model_len", "the model's files name no longest text", action="set it")
        return wanted or self.room.positions

    def close(self) -> None:
        self.weights.close()


class WeightFiles:
    """Files of one version at a time."""

    def __init__(self, model: Any, *, model_dir: str, layout: Layout, lora: LoraSettings, parent: Path) -> None:
        self._config = config_of(model_dir, model, dtype=tensors.main_type(layout))
        self._model_dir = model_dir
        self._layout = layout
        self._lora = lora
        self.names = [spec.name for spec in layout.specs] if lora.rank else stored_names(layout, _derived(model))
        # Only this user may read it; the next start deletes what a killed process left.
        self._private = PrivateDirectory(parent, prefix="weights")
        self.directory = self._private.path
        self._file = self.directory / ("adapter_model.safetensors" if lora.rank else "model.safetensors")

    def arguments(self) -> dict[str, Any]:
        """vLLM's arguments for adapters; raises ConfigError without room for the rank."""
        if not self._lora.rank:
            return {}
        return {
            "enable_lora": True,
            "max_lora_rank": adapter_room(self._lora.rank),
            "max_loras": 1,
            "max_cpu_loras": 1,
            # Else vLLM adds empty adapters; over the output layer they fail on prompt log-probs on a CPU.
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
        """Load the written file into a process, or raise EngineDied."""
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
        """Directory to start a process from: the version, or adapters' base model."""
        if self._lora.rank:
            yield self._model_dir
            return
        # One for each process that starts: a hard link to the same file.
        directory = Path(tempfile.mkdtemp(prefix="model-", dir=self.directory))
        try:
            (directory / "config.json").write_text(self._config, encoding="utf-8")
            (directory / "model.safetensors").hardlink_to(self._file)
            yield str(directory)
        finally:
            shutil.rmtree(directory)

    def clear(self) -> None:
        self._file.unlink(missing_ok=True)

    def close(self) -> None:
        self._private.close()


def write_weights(
    arena: Arena, path: Path, *, names: Sequence[str], rename: Callable[[str], str] = lambda name: name
) -> int:
    """Write an arena's tensors as a safetensors file; returns its bytes.

    No copy is made in memory. Only this user may read the file, which appears complete or not at all. Tied tensors have
    one name (`stored_names`); `rename` maps a tensor's name to the file's.
    """
    specs = [arena.layout.spec(name) for name in names]
    plan = SafetensorsLayout(
        [(rename(name), _TYPES[spec.dtype], spec.shape) for name, spec in zip(names, specs, strict=True)]
    )
    with replacing(path, is_durable=False, mode=0o600) as file:
        file.write(plan.header)
        for name in names:
            values = arena.view(name)
            file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).data)
    return plan.num_bytes


def stored_names(layout: Layout, is_derived: Callable[[str], bool]) -> list[str]:
    """One name for each storage: the first underived one, as in checkpoints."""
    chosen: dict[str, str] = {}
    for spec in layout.specs:
        owner = spec.alias_of or spec.name
        if owner not in chosen or is_derived(chosen[owner]):
            chosen[owner] = spec.name
    return sorted(chosen.values())


def _peft_name(name: str) -> str:
    module, _, part = name.rpartition(".")
    return f"base_model.model.{module}.{_PEFT[part]}.weight"


def _derived(model: Any) -> Callable[[str], bool]:
    """Whether transformers ties a tensor to another, by name or pattern."""
    tied = list(getattr(model, "_tied_weights_keys", None) or ())
    return lambda name: any(re.fullmatch(pattern, name) for pattern in tied)


class PrivateDirectory:
    """A directory deleted by `close`, or by the next such process."""

    def __init__(self, parent: Path, *, prefix: str) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        remove_left(parent, prefix=prefix)
        while True:
            descriptor, name = tempfile.mkstemp(prefix=f"{prefix}-", suffix=LOCK, dir=parent)
            self._file = open(descriptor, "wb")  # noqa: SIM115, PTH123
            self._lock = Path(name)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # Another process may have deleted it between the two lines.
            if self._lock.exists():
                break
            self._file.close()
        self.path = self._lock.with_suffix("")
        self.path.mkdir(mode=0o700)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.unlink(missing_ok=True)
        self._file.close()


def remove_left(parent: Path, *, prefix: str) -> None:
    """Delete directories whose owners are gone."""
    for lock in parent.glob(f"{prefix}-*{LOCK}"):
        # Another user's file, or one that is gone: left to its owner.
        with contextlib.suppress(OSError), lock.open("r+b") as file:
            if not try_lock(file):
                continue
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
