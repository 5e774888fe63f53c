"""What all engines of a node draw from: the model on the CPU, the reference, a version's weights on their way.

    all weights   one safetensors file, read by every worker's `load_arena_file`; or a whole model, to start from
    adapters      a directory as `peft` writes it, read by vLLM's own loader of adapters, over the base model

Files lie in a directory of this process that only this user can read:

    PARENT/PREFIX-xxxx/      the directory
    PARENT/PREFIX-xxxx.lock  locked while its owner lives; the kernel lets go of it, however that ends

Guarantees: a version's file is written once for all engines that load it within one `written`, and gone after it; what
a killed process left goes at the next start, but no directory without a lock file: it is an earlier program's or
somebody else's; no pickle. Must never import vllm.
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
from heterorl.common.model.model_loading import load_pretrained, token_limits_of, window_of
from heterorl.common.process.files import replacing, try_lock
from heterorl.common.types.common import Digest, Float32Array, Int32Array, LoraSettings, SamplingSemantics
from heterorl.common.weights.arena import Arena, Dtype, Layout
from heterorl.common.weights.safetensors_layout import SafetensorsLayout
from heterorl.sampler.vllm.vllm_process import VllmProcess
from heterorl.sampler.vllm.weight_canary import Reference

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for."""
_TYPES: dict[Dtype, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8_e4m3": "F8_E4M3", "int8": "I8"}
_PEFT = dict(zip(PARTS, ("lora_A", "lora_B"), strict=True))
LOCK = ".lock"


class SharedModel:
    """One for a node, however many engines it has."""

    def __init__(
        self,
        *,
        model_dir: str,
        published_dtype: Dtype,
        sampling: SamplingSemantics,
        weights_dir: Path,
        lora: LoraConfig = ALL_WEIGHTS,
        canary_device: str = "cpu",
    ) -> None:
        """Load the model on the CPU: the reference, which keeps no weights of its own.

        Args:
            model_dir: Hugging Face directory or hub id.
            published_dtype: type of the weights that engines take.
            sampling: meaning of a log-prob.
            weights_dir: where a private directory for the weights on their way is made.
            lora: adapters to take instead of all weights; the base model stays, in vLLM and in the reference.
            canary_device: computes the reference, a module's weights at a time.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        self.model_dir = model_dir
        self.sampling = sampling
        self._canary_device = canary_device
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
        # Of the file and the number of engines that read it.
        self._writing = threading.Lock()
        self._num_readers = 0
        # Of the reference, and what it said of a version's sequences.
        self._computing = threading.Lock()
        self._known: dict[tuple[object, ...], list[Float32Array]] = {}

    def base(self) -> Arena | None:
        """Weights of model_dir in the published type; None once others were loaded."""
        if self._reference is not None:
            return None
        arena = Arena(self.layout)
        tensors.store(self.model, arena)
        return arena

    @contextmanager
    def written(self, arena: Arena) -> Iterator[None]:
        """The version's file, from the first who asks for it until the last one has done with it."""
        with self._writing:
            if not self._num_readers:
                self._reference = self._reference or Reference(self.model, self.layout, device=self._canary_device)
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
        """What the reference says of sequences, within `written`: computed once for all engines that drew the same."""
        assert self._reference is not None
        name = (*starts, *(sequence.tobytes() for sequence in sequences))
        with self._computing:
            if name not in self._known:
                self._known[name] = self._reference.logprobs(arena, sequences, starts, self.sampling)
            return self._known[name]

    def longest(self, wanted: int) -> int:
        """Tokens of prompt and completion together: `wanted`, or all that the model allows where it is 0.

        Raises:
            ConfigError: vLLM would compute other positions than the learner.
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
        """Delete the directory of the weights."""
        self.weights.close()


class WeightFiles:
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
    """Write tensors of an arena as a safetensors file, without a second copy of them in memory; returns its bytes.

    Only this user may read the file, which appears complete or not at all. Tied tensors are stored under one name
    (`stored_names`); `rename` leads from a tensor's name to that in the file.
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
    """One name for each storage: of tied tensors the first that is not derived from another, as checkpoints have it."""
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


class PrivateDirectory:
    """A directory that goes with `close`, or with the next process that makes one like it."""

    def __init__(self, parent: Path, *, prefix: str) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        remove_left(parent, prefix=prefix)
        while True:
            descriptor, name = tempfile.mkstemp(prefix=f"{prefix}-", suffix=LOCK, dir=parent)
            self._file = open(descriptor, "wb")  # noqa: SIM115, PTH123
            self._lock = Path(name)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # Whoever cleaned up between the two lines took it for nobody's.
            if self._lock.exists():
                break
            self._file.close()
        self.path = self._lock.with_suffix("")
        self.path.mkdir(mode=0o700)

    def close(self) -> None:
        """Delete it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.unlink(missing_ok=True)
        self._file.close()


def remove_left(parent: Path, *, prefix: str) -> list[Path]:
    """Delete directories whose owners are gone; returns them."""
    removed = []
    for lock in parent.glob(f"{prefix}-*{LOCK}"):
        # Somebody else's file, or gone meanwhile: its owner's business.
        with contextlib.suppress(OSError), lock.open("r+b") as file:
            if not try_lock(file):
                continue
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            lock.unlink(missing_ok=True)
            removed.append(lock.with_suffix(""))
    return removed
