"""Checks of this machine: disk, memory, device, versions, contract.

Measurements write one small temporary file next to the state and load no weights. Judgements (`judge_*`) are pure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import grpc

from heterorl import __version__
from heterorl.common.errors import ConfigError, HeterorlError, install_command
from heterorl.common.identity.spiffe import Role
from heterorl.common.model.model_shape import shape_of_directory
from heterorl.common.rpc.maintenance import Diagnosis
from heterorl.common.types.common import NO_LORA, Contract, Digest, amount
from heterorl.coordinator.versions.lineage import contract_difference, contract_remedy
from heterorl.doctor.check import TIMEOUT, UNSTATED, Check, Failure, fail, ok, skip, warn

NUM_SYNCS = 16
_BLOCK = bytes(4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A directory's disk; `sync_s` is the median durable write of 4 KiB."""

    path: str
    free_bytes: int
    sync_s: float
    kept_bytes: int = 0
    """Bytes of a learner's checkpoints: the learner deletes old ones after a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Installed versions; None for a missing package."""

    heterorl: str
    python: str
    grpc: str
    torch: str | None
    engine: str | Failure | None = None
    """The engine's package and version, or why it does not fit; None if the configuration needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU: its name and its memory, bytes."""

    name: str
    free_bytes: int
    total_bytes: int


def measure_disk(directory: Path) -> Disk | Failure:
    """Write and sync a few blocks at the directory's place."""
    place = directory
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        free = shutil.disk_usage(place).free
        times = []
        with tempfile.NamedTemporaryFile(prefix=".heterorl-doctor-", dir=place, buffering=0) as file:
            for _ in range(NUM_SYNCS):
                started = time.perf_counter()
                file.write(_BLOCK)
                os.fsync(file.fileno())
                times.append(time.perf_counter() - started)
    except OSError as error:
        kinds = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EROFS: "readonly"}
        return Failure(kind=kinds.get(error.errno or 0, "denied"), detail=f"{place}: {error.strerror}")
    kept = 0
    with contextlib.suppress(OSError):
        kept = sum(path.stat().st_size for path in (directory / "checkpoints").rglob("*") if path.is_file())
    return Disk(path=str(place), free_bytes=free, sync_s=statistics.median(times), kept_bytes=kept)


def measure_memory(root: Path = Path("/")) -> int | Failure:
    """Bytes that a new process can get from machine and control group."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError) as error:
        return Failure(kind="unknown", detail=f"/proc/meminfo: {error}")
    # memory.max is "max" without a limit, and is missing without a control group.
    with contextlib.suppress(OSError, ValueError):
        group = root / "sys/fs/cgroup"
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        with contextlib.suppress(OSError, ValueError):
            # Pages of files count as used, and the kernel takes them back.
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            used -= int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        free = min(free, limit - max(0, used))
    return free


def measure_versions(engine: str = "") -> Versions:
    """Read installed versions, also of an engine's package, without importing them."""
    torch: str | None = None
    with contextlib.suppress(PackageNotFoundError):
        torch = version("torch")
    fit: str | Failure | None = None
    if engine:
        from heterorl.common.model.library_versions import check_package

        try:
            fit = f"{engine} {check_package(engine)}"
        except HeterorlError as error:
            fit = Failure(kind=engine, detail=str(error.args[0]))
    return Versions(
        heterorl=__version__, python=platform.python_version(), grpc=grpc.__version__, torch=torch, engine=fit
    )


def measure_devices(devices: Sequence[str]) -> Device | Failure:
    """Look at GPUs through torch; the one with least memory counts."""
    try:
        import torch
    except ImportError as error:
        return Failure(kind="no_torch", detail=str(error))
    if not torch.cuda.is_available():
        return Failure(kind="no_cuda", detail=f"torch {torch.__version__} sees no GPU")
    found: list[Device] = []
    num_seen = torch.cuda.device_count()
    for device in devices:
        try:
            place = torch.device(device)
            if (place.index or 0) >= num_seen:
                return Failure(kind="no_device", detail=f"no {device}: torch sees {amount(num_seen, 'GPU')}")
            free, total = torch.cuda.mem_get_info(place)
            found.append(Device(name=torch.cuda.get_device_name(place), free_bytes=free, total_bytes=total))
        except (RuntimeError, ValueError) as error:
            return Failure(kind="unusable", detail=f"{str(error).splitlines()[0]} ({device})")
    return min(found, key=lambda one: one.free_bytes)


def model_bytes(model_dir: str) -> int:
    """Bytes of a model's weights in bf16; 0 if one is missing."""
    try:
        num_bytes = sum(path.stat().st_size for path in Path(model_dir).glob("*.safetensors")) if model_dir else 0
        config = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8")) if num_bytes else {}
        is_fp32 = (config.get("dtype") or config.get("torch_dtype")) == "float32"
    except (OSError, ValueError, AttributeError, RecursionError):
        return 0
    return num_bytes // 2 if is_fp32 else num_bytes


def pass_bytes(model_dir: str, backend: Any) -> int:
    """Activations of a learner's largest pass; 0 for unknown families."""
    try:
        shape = shape_of_directory(Path(model_dir))
    except ConfigError:
        return 0
    tokens, width = backend.micro_batch_tokens / backend.sequence_parallel, 2 if backend.compute_dtype == "bf16" else 4
    return int(shape.activations(tokens, width=width, is_checkpointed=backend.gradient_checkpointing))


def measure_contract(config: Any, *, published_dtype: str) -> Contract | Failure:
    """The contract that a learner or sampler would state, without reading weights.

    With adapters the digest of the base weights stays empty, because it needs all weights.
    """
    try:
        from heterorl.common.model.contract import build_contract
        from heterorl.common.tasks.task_config import build_task
        from heterorl.common.text.conversation import try_task
        from heterorl.common.text.prompter import Prompter

        for path in Path(config.model_dir).glob("*.safetensors"):
            # A link may lack its file.
            path.stat()
        prompter = Prompter.of(config)
        layout_id, vocab_size, routed_token_bytes = _shape(
            config.model_dir, published_dtype, config.lora, records_routing=config.sampling.router_replay == "rollout"
        )
        task = build_task(config.task, measure=prompter.num_tokens)
        try_task(config, task, prompter)
        return build_contract(
            config,
            text=prompter.digests,
            task=task,
            layout_id=layout_id,
            vocab_size=vocab_size,
            end_token_ids=prompter.end_token_ids,
            lora=config.lora.settings(Digest("")),
            routed_token_bytes=routed_token_bytes,
        )
    except (HeterorlError, OSError, ValueError, ImportError) as error:
        return failure_of(error)


def failure_of(error: Exception) -> Failure:
    """Why no contract could be measured, with the error's own remedy."""
    detail = Exception.__str__(error) if isinstance(error, HeterorlError) else str(error)
    return Failure(kind="model", detail=detail.splitlines()[0], action=getattr(error, "action", ""))


def same_base(stated: Contract, own: Contract) -> Contract:
    """The own contract with the run's base digest, not measured here."""
    if stated.lora == NO_LORA or own.lora == NO_LORA:
        return own
    return dataclasses.replace(own, lora=dataclasses.replace(own.lora, base_digest=stated.lora.base_digest))


def _shape(model_dir: str, published_dtype: str, lora: Any, *, records_routing: bool) -> tuple[Digest, int, int]:
    from heterorl.common.model import tensors
    from heterorl.common.model.adapters import attach
    from heterorl.common.model.model_loading import token_limits_of
    from heterorl.common.model.router_replay import routing_shape
    from heterorl.learner.backends.loading import empty_model

    model: Any = empty_model(model_dir)
    if lora.is_on:
        attach(model, lora.settings(Digest("")))
    layout = tensors.layout_of(model, published_dtype)  # type: ignore[arg-type] # one of the configuration's names
    routed_token_bytes = routing_shape(model).token_bytes if records_routing else 0
    return layout.layout_id, token_limits_of(model.config).vocab_size, routed_token_bytes


SYNC_WARN_S = 0.05
"""Each end acknowledges a group after one durable write."""
LEAST_FREE_BYTES = 1 << 30
HOST_TIMES = {(Role.LEARNER, False): 20, (Role.LEARNER, True): 8, (Role.SAMPLER, False): 4, (Role.SAMPLER, True): 3}
"""Host memory in units of the published bf16 state, by role and whether the weights live on a GPU. A learner holds
two published states (2) and a checkpoint's copy (6); on the CPU also weights, gradient and two moments in fp32 (8) and
a pass (4). A sampler holds fp32 weights (2), the current state and the next one."""
PROCESS_BYTES = 1 << 30
"""Memory of a process with torch and its libraries."""
DEVICE_TIMES = {Role.LEARNER: 11, Role.SAMPLER: 2}
"""GPU memory in the same units, with a little for keys and values."""
DISK_TIMES = {Role.LEARNER: (7, 21)}
"""Disk in the same units, of one checkpoint (14 bytes a parameter) and of three: without room for the next one the
check fails, for three with the kept ones it warns. Other roles: 1 and 2."""


def judge_disk(fact: Disk | Failure, *, key: str, role: Role, state_bytes: int) -> Check:
    """Whether the disk is large and fast enough; `key` names its setting."""
    if isinstance(fact, Failure):
        remedies = {
            "full": "free space there: the disk is full",
            "readonly": f"mount it writable, or set {key} to another directory",
            "denied": f"give this user write access, or set {key} to another directory",
            "timeout": "check the disk or the file server: a small write does not finish",
        }
        return fail("disk", fact.detail, remedies[fact.kind])
    least_times, times = DISK_TIMES.get(role, (1, 2))
    least = max(least_times * state_bytes, LEAST_FREE_BYTES // 4)
    need = max(LEAST_FREE_BYTES, times * state_bytes - fact.kept_bytes)
    found = f"{_gib(fact.free_bytes)} free under {fact.path}, a durable write takes {fact.sync_s * 1e3:.3g} ms"
    if fact.free_bytes < least:
        return fail("disk", found, f"free space: at least {_gib(least)} is needed")
    if fact.free_bytes < need:
        return warn("disk", found, f"free space: {_gib(need)} is recommended")
    if fact.sync_s > SYNC_WARN_S:
        return warn("disk", found, f"put {key} on a faster local disk: each group waits for one durable write")
    return ok("disk", found)


def judge_memory(fact: int | Failure, *, role: Role, is_on_gpu: bool, state_bytes: int, pass_bytes: int = 0) -> Check:
    """Whether the model fits.
    `state_bytes` are of the published state, 0 if unknown, `pass_bytes` of a pass in this memory."""
    if isinstance(fact, Failure):
        return skip("memory", fact.detail)
    found = f"{_gib(fact)} available"
    if role not in {Role.LEARNER, Role.SAMPLER} or not state_bytes:
        return ok("memory", found)
    need = PROCESS_BYTES + HOST_TIMES[role, is_on_gpu] * state_bytes + pass_bytes
    found += f", this model needs about {_gib(need)}"
    if fact < state_bytes:
        return fail("memory", found, "use a machine with more memory, or stop processes that use it")
    if fact < need:
        return warn("memory", found, f"stop processes that use memory, or use a larger machine{_smaller(pass_bytes)}")
    return ok("memory", found)


def judge_device(
    fact: Device | Failure | None,
    *,
    device: str,
    role: Role,
    state_bytes: int,
    need_bytes: int,
    pass_bytes: int = 0,
    share: float = 0.0,
) -> Check:
    """Whether the configured device is there; `fact` is None on a CPU.
    `share` is the share of its memory that must be free, `pass_bytes` the part of `need_bytes` of a pass."""
    if fact is None:
        return ok("gpu", f"not configured: device is {device}")
    if isinstance(fact, Failure):
        remedies = {
            "no_torch": f"install torch, {install_command(role)}",
            "no_cuda": "install the driver and torch with CUDA, or set the device to cpu (vLLM: install its CPU build)",
            "no_device": "correct the number of the device",
            "unusable": "check that GPU (nvidia-smi): it may be held or full, or this torch is not built for it",
            "timeout": "check the driver (nvidia-smi): it does not answer",
        }
        return fail("gpu", f"{device}: {fact.detail}", remedies[fact.kind])
    found = f"{device}: {fact.name}, {_gib(fact.free_bytes)} of {_gib(fact.total_bytes)} free"
    if fact.free_bytes < need_bytes:
        remedy = f"free GPU memory or use a larger GPU: about {_gib(need_bytes)} is needed{_smaller(pass_bytes)}"
        return (fail if fact.free_bytes < state_bytes else warn)("gpu", found, remedy)
    if fact.free_bytes < share * fact.total_bytes:
        free = int(100 * fact.free_bytes / fact.total_bytes) / 100
        remedy = f"stop what holds this GPU, or lower engine.memory_share: its engines may take {free:g} together"
        return warn("gpu", f"{found}; vLLM does not start unless {share:g} of it is free", remedy)
    return ok("gpu", found)


def _smaller(pass_bytes: int) -> str:
    keys = "lower backend.micro_batch_tokens, or set backend.gradient_checkpointing"
    return f"; a pass takes up to {_gib(pass_bytes)}: {keys}" if pass_bytes else ""


def judge_versions(fact: Versions, *, role: Role, diagnosis: Diagnosis | None) -> Check:
    """Whether this node's versions fit the coordinator's."""
    own = f"heterorl {fact.heterorl}, Python {fact.python}, grpc {fact.grpc}, torch {fact.torch or 'none'}"
    if role in {Role.LEARNER, Role.SAMPLER} and fact.torch is None:
        return fail("versions", own, f"install torch, {install_command(role)}")
    if isinstance(fact.engine, Failure):
        return fail("versions", f"{own}; {fact.engine.detail}", install_command(fact.engine.kind))
    if fact.engine is not None:
        own += f", {fact.engine}"
    if diagnosis is None:
        return ok("versions", own)
    found = f"{own}; coordinator: heterorl {diagnosis.heterorl_version}, Python {diagnosis.python_version}"
    found += f", grpc {diagnosis.grpc_version}"
    if fact.heterorl != diagnosis.heterorl_version:
        remedy = f"install heterorl {diagnosis.heterorl_version} here, or the newer release at both ends"
        return warn("versions", found, remedy)
    return ok("versions", found)


def judge_contract(fact: Contract | Failure | None, *, diagnosis: Diagnosis | None) -> Check:
    """Whether the run admits this node; `fact` is None without a model."""
    if fact is None:
        return skip("contract", "model_dir is not set")
    if isinstance(fact, Failure) and fact.kind != UNSTATED:
        slow = "run it again when this machine is idle, or copy the model to a faster local disk"
        remedy = slow if fact.kind == TIMEOUT else fact.action or "correct model_dir or [task]: loading failed"
        return fail("contract", fact.detail, remedy)
    if diagnosis is None:
        loads = "" if isinstance(fact, Failure) else "the model loads; "
        return skip("contract", f"{loads}the coordinator was not reached")
    if diagnosis.contract is None or isinstance(fact, Failure):
        return warn("contract", "the run has no contract yet", "start the learner: it states the contract")
    difference = contract_difference(diagnosis.contract, same_base(diagnosis.contract, fact))
    if not difference:
        return ok("contract", "model, tokenizer, task and sampling match the run")
    shown = re.sub(r"[0-9a-f]{64}", lambda digest: f"{digest[0][:12]}...", difference)
    return fail("contract", shown, contract_remedy(difference))


def judge_loss(loss: Any, *, max_new_tokens: int) -> Check:
    """Judge a loss by completion length times KL a token between engines.

    The KL is the paper's; a run measures its own as `kl_token_fresh`.
    """
    from heterorl.learner.loss.loss_spec import KL_TOKEN, length_caveats, loss_spec_of, open_share

    try:
        spec = loss_spec_of(loss)
    except (ConfigError, ImportError) as error:
        return fail("loss", str(error), "correct [loss], or install what it imports")
    nats, share = KL_TOKEN * max_new_tokens, open_share(spec, max_new_tokens=max_new_tokens)
    found = (
        f"engines {KL_TOKEN:g} nats a token apart x {max_new_tokens:,} tokens = {nats:.2g} nats a completion"
        f" (docs/losses.md, long completions): {share:.0%} of the rollouts with A < 0 train"
    )
    remedies = [remedy for _, remedy in length_caveats(spec, max_new_tokens=max_new_tokens)]
    return warn("loss", found, "; ".join(remedies)) if remedies else ok("loss", found)


def judge_groups(own: int, *, counted: int) -> Check:
    """Whether the coordinator's pacing counts a version as the learner makes it."""
    if own == counted:
        return ok("groups", f"a version takes {amount(own, 'group')}, as the coordinator counts")
    found = (
        f"a version takes {amount(own, 'group')} (groups_per_step x steps_per_version), and the coordinator counts"
        f" {counted} (groups_per_version): it hands out too {'little' if counted < own else 'much'} work ahead"
    )
    effect = "samplers idle" if counted < own else "groups grow staler than it expects"
    return warn("groups", f"{found}, so that {effect}", f"set the coordinator's groups_per_version to {own}")


def _gib(num_bytes: int) -> str:
    if num_bytes < 1 << 30:
        return f"{num_bytes / 2**20:.3g} MiB"
    return f"{num_bytes / 2**30:.3g} GiB"
