"""Measures this machine: disk, memory, devices, versions, and the contract that its configuration would state.

Guarantees: what it writes is one small file beside the state, which is gone afterwards; no weights are loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import platform
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import grpc

from heterorl import __version__
from heterorl.common.errors import ConfigError, HeterorlError
from heterorl.common.types.common import NO_LORA, Contract, Digest
from heterorl.doctor.check import Trouble

NUM_SYNCS = 16
_BLOCK = bytes(4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The disk under a directory: bytes free, and the median time of a durable write of 4 KiB, seconds."""

    path: str
    free_bytes: int
    sync_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What runs here; None for a package that is not installed."""

    heterorl: str
    python: str
    grpc: str
    torch: str | None
    engine: str | Trouble | None = None
    """Engine's package and version, or why it does not fit; None where the configuration needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU: its name and its memory, bytes."""

    name: str
    free_bytes: int
    total_bytes: int


def measure_disk(directory: Path) -> Disk | Trouble:
    """Write and sync a few blocks where a directory is or would be made."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
        handle, name = tempfile.mkstemp(prefix=".heterorl-doctor-", dir=place)
    except OSError as error:
        return _disk_trouble(place, error)
    try:
        times = []
        for _ in range(NUM_SYNCS):
            started = time.perf_counter()
            os.write(handle, _BLOCK)
            os.fsync(handle)
            times.append(time.perf_counter() - started)
    except OSError as error:
        return _disk_trouble(place, error)
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            Path(name).unlink()
    return Disk(path=str(place), free_bytes=free, sync_s=statistics.median(times))


def measure_memory(root: Path = Path("/")) -> int | Trouble:
    """Bytes of memory that a new process can get: of the machine, and of its control group."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError) as error:
        return Trouble(kind="unknown", detail=f"/proc/meminfo: {error}")
    # An unlimited group says "max", and a machine without one has no file.
    with contextlib.suppress(OSError, ValueError):
        group = root / "sys/fs/cgroup"
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        free = min(free, limit - int((group / "memory.current").read_text(encoding="ascii")))
    return free


def measure_versions(engine: str = "") -> Versions:
    """Read what is installed, an engine's package too where one is named; nothing is imported for it."""
    try:
        torch: str | None = version("torch")
    except PackageNotFoundError:
        torch = None
    fit: str | Trouble | None = None
    if engine:
        from heterorl.common.model.packages import check_engine

        try:
            fit = f"{engine} {check_engine(engine)}"
        except HeterorlError as error:
            fit = Trouble(kind=engine, detail=str(error.args[0]))
    return Versions(
        heterorl=__version__, python=platform.python_version(), grpc=grpc.__version__, torch=torch, engine=fit
    )


def measure_device(device: str) -> Device | Trouble:
    """Look at a GPU through torch."""
    try:
        import torch
    except ImportError as error:
        return Trouble(kind="no_torch", detail=str(error))
    try:
        if not torch.cuda.is_available():
            return Trouble(kind="no_cuda", detail=f"torch {torch.__version__} sees no GPU")
        free, total = torch.cuda.mem_get_info(torch.device(device))
        return Device(name=torch.cuda.get_device_name(torch.device(device)), free_bytes=free, total_bytes=total)
    except (RuntimeError, ValueError) as error:
        return Trouble(kind="no_device", detail=str(error).splitlines()[0])


def model_bytes(model_dir: str) -> int:
    """Bytes of the weight files of a local model; 0 where there are none."""
    return sum(path.stat().st_size for path in Path(model_dir).glob("*.safetensors")) if model_dir else 0


def measure_contract(config: Any, *, published_dtype: str) -> Contract | Trouble:
    """What a learner or sampler would state, from configuration, tokenizer and task alone; no weights are read.

    With adapters the digest of the base weights stays empty: it needs all of them.
    """
    from heterorl.common.model.contract import build_contract
    from heterorl.common.model.positions import room_at
    from heterorl.common.tasks.registry import build_task
    from heterorl.common.tasks.sources.revision import NOTES
    from heterorl.common.text.conversation import open_conversations
    from heterorl.common.text.prompts import Prompter
    from heterorl.common.text.trial import try_answers, try_prompts, try_reward

    try:
        prompter = Prompter(
            config.model_dir,
            use_chat_template=config.use_chat_template,
            template_arguments=config.chat_template_arguments,
        )
        layout_id, vocab_size, routed_token_bytes = _shape(
            config.model_dir, published_dtype, config.lora, records_routing=config.sampling.router_replay == "rollout"
        )
        task = build_task(config.task, measure=prompter.num_tokens, notes=config.state_dir / NOTES)
        try_prompts(task, prompter, room=room_at(config.model_dir), max_new_tokens=config.sampling.max_new_tokens)
        try_answers(task)
        end_token_ids = config.sampling.end_token_ids or prompter.end_token_ids
        open_conversations(task, prompter, end_token_ids=end_token_ids, tool_parser=config.task.tool_parser)
        try_reward(task, prompter)
        return build_contract(
            text=prompter.digests,
            task=task,
            layout_id=layout_id,
            vocab_size=vocab_size,
            group_size=config.group_size,
            min_members=config.sampling.members(config.group_size),
            max_turns=config.task.max_turns_of_all,
            trajectory_s=config.task.trajectory_s_of_all,
            max_trajectory_tokens=config.sampling.max_trajectory_tokens,
            sampling=config.sampling.semantics(),
            end_token_ids=end_token_ids,
            lora=config.lora.settings(Digest("")),
            routed_token_bytes=routed_token_bytes,
        )
    except (HeterorlError, OSError, ValueError, ImportError) as error:
        return Trouble(kind="model", detail=str(error).splitlines()[0])


def same_base(stated: Contract, own: Contract) -> Contract:
    """The own contract with the run's digest of base weights, which is not measured here."""
    if stated.lora == NO_LORA or own.lora == NO_LORA:
        return own
    return dataclasses.replace(own, lora=dataclasses.replace(own.lora, base_digest=stated.lora.base_digest))


def _shape(model_dir: str, published_dtype: str, lora: Any, *, records_routing: bool) -> tuple[Digest, int, int]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from heterorl.common.model import tensors
    from heterorl.common.model.adapters import attach
    from heterorl.common.model.building import BUILDING
    from heterorl.common.model.directory import first_line
    from heterorl.common.model.positions import room_of
    from heterorl.common.model.routing import routing_shape

    try:
        settings: Any = AutoConfig.from_pretrained(model_dir)
        with BUILDING, torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(settings)  # type: ignore[no-untyped-call]
        model.tie_weights()
    except Exception as error:
        raise ConfigError("model_dir", f"cannot load {model_dir}: {first_line(error)}") from error
    if lora.is_on:
        attach(model, lora.settings(Digest("")))
    layout = tensors.layout_of(model, published_dtype)  # type: ignore[arg-type] # one of the configuration's names
    routed_token_bytes = routing_shape(model).token_bytes if records_routing else 0
    return layout.layout_id, room_of(settings).vocab_size, routed_token_bytes


def _disk_trouble(place: Path, error: OSError) -> Trouble:
    kinds = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EROFS: "readonly"}
    return Trouble(kind=kinds.get(error.errno or 0, "denied"), detail=f"{place}: {error.strerror}")
