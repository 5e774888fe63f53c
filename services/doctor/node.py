"""What is to be said about this machine: pure decisions over measured facts."""

from __future__ import annotations

import re

from heterorl.common.identity.identity import Role
from heterorl.common.rpc.roles import Diagnosis
from heterorl.common.types.common import Contract
from heterorl.coordinator.versions.lineage import contract_difference
from heterorl.doctor.check import Check, Trouble, fail, ok, skip, warn
from heterorl.doctor.machine import Device, Disk, Versions, same_base

SYNC_WARN_S = 0.05
"""A group is acknowledged after one durable write at each end."""
LEAST_FREE_BYTES = 1 << 30
HOST_TIMES = {(Role.LEARNER, False): 10, (Role.LEARNER, True): 4, (Role.SAMPLER, False): 4, (Role.SAMPLER, True): 3}
"""Memory of the host, in sizes of the published bf16 state, by role and whether the weights live on a GPU. A learner on
the CPU keeps weights, gradient and two moments in fp32 (8) and two published states; a sampler fp32 weights (2), the
state that it has and the one that it builds."""
DEVICE_TIMES = {Role.LEARNER: 9, Role.SAMPLER: 2}
"""Memory of the GPU in the same sizes, with a little for activations or keys and values."""
_CONTRACT = {
    "tokenizer_digest": "copy the run's model directory again: the tokenizer is another one",
    "chat_template_digest": "set use_chat_template as the learner does, with the run's tokenizer",
    "task_digest": "make [task] the learner's, with the same bytes in the data file and in the files of an own reward",
    "num_prompts": "make [task] the learner's, with the same data file",
    "layout_id": "name the run's model in model_dir and the learner's published_dtype",
    "vocab_size": "name the run's model in model_dir",
    "group_size": "make group_size the learner's",
    "sampling": "make [sampling] the learner's",
    "lora": "make [lora] the learner's",
}


def judge_disk(fact: Disk | Trouble, *, key: str, state_bytes: int) -> Check:
    """Whether the state has room and a disk that keeps what it is given; `key` names the directory's setting."""
    if isinstance(fact, Trouble):
        remedies = {
            "full": "free space there: nothing can be written",
            "readonly": f"mount it writable, or name another directory in {key}",
            "denied": f"let this user write there, or name another directory in {key}",
            "timeout": "look at the disk or the file server: a small write does not end",
        }
        return fail("disk", fact.detail, remedies[fact.kind])
    need = max(LEAST_FREE_BYTES, 2 * state_bytes)
    found = f"{_gib(fact.free_bytes)} free under {fact.path}, a durable write takes {fact.sync_s * 1e3:.3g} ms"
    if fact.free_bytes < max(state_bytes, LEAST_FREE_BYTES // 4):
        return fail("disk", found, f"free space: at least {_gib(need)} are needed")
    if fact.free_bytes < need:
        return warn("disk", found, f"free space: {_gib(need)} are better")
    if fact.sync_s > SYNC_WARN_S:
        return warn("disk", found, f"put {key} on a faster local disk: each group waits for such a write")
    return ok("disk", found)


def judge_memory(fact: int | Trouble, *, role: Role, is_on_gpu: bool, state_bytes: int) -> Check:
    """Whether the model fits; `state_bytes` is the size of the published state, 0 when nobody knows it."""
    if isinstance(fact, Trouble):
        return skip("memory", fact.detail)
    found = f"{_gib(fact)} available"
    if role not in {Role.LEARNER, Role.SAMPLER} or not state_bytes:
        return ok("memory", found)
    need = HOST_TIMES[role, is_on_gpu] * state_bytes
    found += f", a {role} of this model needs about {_gib(need)}"
    if fact < state_bytes:
        return fail("memory", found, "take a machine with more memory, or stop what uses it")
    return (
        warn("memory", found, "stop what uses memory, or take a larger machine") if fact < need else ok("memory", found)
    )


def judge_device(fact: Device | Trouble | None, *, device: str, role: Role, state_bytes: int) -> Check:
    """Whether the configured device is there; None where nobody asks for a GPU."""
    if fact is None:
        return ok("gpu", f"none is asked for: {device}")
    if isinstance(fact, Trouble):
        remedies = {
            "no_torch": f"install torch: pip install 'heterorl[{role}]'",
            "no_cuda": "install the driver and a torch for CUDA, or set the device to cpu",
            "no_device": "correct the number of the device",
            "timeout": "look at the driver (nvidia-smi): it does not answer",
        }
        return fail("gpu", f"{device}: {fact.detail}", remedies[fact.kind])
    found = f"{device}: {fact.name}, {_gib(fact.free_bytes)} of {_gib(fact.total_bytes)} free"
    need = DEVICE_TIMES[role] * state_bytes
    if fact.free_bytes < need:
        remedy = f"free the GPU's memory or take a larger one: about {_gib(need)} are needed"
        return (fail if fact.free_bytes < state_bytes else warn)("gpu", found, remedy)
    return ok("gpu", found)


def judge_versions(fact: Versions, *, role: Role, diagnosis: Diagnosis | None) -> Check:
    """Whether what runs here fits what runs there."""
    own = f"heterorl {fact.heterorl}, Python {fact.python}, grpc {fact.grpc}, torch {fact.torch or 'none'}"
    if role in {Role.LEARNER, Role.SAMPLER} and fact.torch is None:
        return fail("versions", own, f"install torch: pip install 'heterorl[{role}]'")
    if isinstance(fact.engine, Trouble):
        return fail("versions", f"{own}; {fact.engine.detail}", f"pip install 'heterorl[{fact.engine.kind}]'")
    if fact.engine is not None:
        own += f", {fact.engine}"
    if diagnosis is None:
        return ok("versions", own)
    found = f"{own}; coordinator: heterorl {diagnosis.heterorl_version}, Python {diagnosis.python_version}"
    found += f", grpc {diagnosis.grpc_version}"
    if fact.heterorl != diagnosis.heterorl_version:
        return warn("versions", found, f"install heterorl {diagnosis.heterorl_version} here, or the newer one on both")
    return ok("versions", found)


def judge_contract(fact: Contract | Trouble | None, *, diagnosis: Diagnosis | None) -> Check:
    """Whether this node would be admitted to the run; None where no model is configured."""
    if fact is None:
        return skip("contract", "model_dir is not set")
    if isinstance(fact, Trouble):
        if fact.kind == "timeout":
            remedy = (
                "ask again when this machine is less busy; on an idle one, copy the model to a faster local directory"
            )
            return fail("contract", fact.detail, remedy)
        return fail("contract", fact.detail, "correct model_dir and [task]: they cannot be loaded")
    if diagnosis is None:
        return skip("contract", "the model can be loaded; the coordinator was not reached")
    if diagnosis.contract is None:
        return warn("contract", "the run has none yet", "start the learner: it states the contract")
    difference = contract_difference(diagnosis.contract, same_base(diagnosis.contract, fact))
    if not difference:
        return ok("contract", "model, tokenizer, task and sampling are the run's")
    shown = re.sub(r"[0-9a-f]{64}", lambda digest: f"{digest[0][:12]}...", difference)
    return fail("contract", shown, _CONTRACT[difference.partition(":")[0].partition(".")[0]])


def _gib(num_bytes: int) -> str:
    if num_bytes < 1 << 30:
        return f"{num_bytes / 2**20:.3g} MiB"
    return f"{num_bytes / 2**30:.3g} GiB"
