"""Runs the checks of a node in order.

A check is skipped if an earlier failure makes it impossible. Each measurement has its own time limit, so the whole
always ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError, InvalidRequest
from heterorl.common.identity.credentials import Revocations, read_material
from heterorl.common.identity.spiffe import Identity, Refusal, Role, read_identity
from heterorl.common.identity.tls import TlsConfig, check_tls
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.maintenance import Diagnosis, DiagnosisClient
from heterorl.common.rpc.transport_options import proxy_variable
from heterorl.common.types.common import Contract
from heterorl.doctor import link_checks as link
from heterorl.doctor import machine_checks as machine
from heterorl.doctor.check import UNSTATED, Check, Failure, skip
from heterorl.doctor.link_checks import in_daemon_thread

MESSAGE_BYTES = 16 << 20
"""Message limit of a service without that setting."""
CONNECT_S, ANSWER_S, MESSAGE_S, DISK_S, DEVICE_S, MODEL_S = 5.0, 15.0, 20.0, 15.0, 60.0, 120.0
"""Time limit of each measurement; of name, port and handshake each the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorTarget:
    """The node to check; an empty `site` accepts any certificate."""

    role: Role
    address: str
    tls: TlsConfig
    state_dir: Path
    state_key: str
    site: str = ""
    devices: tuple[str, ...] = ("cpu",)
    copies: float = 1.0
    """Copies of the model on one device; 0 if the number of ranks decides."""
    memory_share: float = 0.0
    """Share of a device's memory that vLLM's engines must find free; 0 for others."""
    pass_bytes: int = 0
    """Activations of a learner's largest pass."""
    sized_as: Role | None = None
    """Role whose memory the model needs, if another: a learner of adapters needs a sampler's."""
    engine: str = ""
    """Package of an optional engine or backend."""
    published_dtype: str = "bf16"
    max_message_bytes: int = MESSAGE_BYTES
    model_config: Any = None
    """The configuration if it names a model, else None."""
    loss: Any = None
    """A learner's [loss], else None."""
    max_new_tokens: int = 0
    groups_per_version: int = 0
    """Groups of a learner's version."""
    num_calls: int = 10

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


async def examine(target: DoctorTarget, *, wall_time: Callable[[], float] = time.time) -> list[Check]:
    """Run every check, in order of dependency."""
    joins = getattr(target.model_config, "join", None) is not None
    # The machine is measured during the network checks, except for what only the run knows.
    alone = dataclasses.replace(target, model_config=None) if joins else target
    local = asyncio.create_task(_measure_machine(alone))
    try:
        checks, diagnosis = await _examine_link(target, wall_time)
        if target.role is Role.COORDINATOR:
            plain = skip("revoked", "plaintext over loopback")
            checks.append(plain if target.tls.insecure else link.judge_revoked(read_revoked(target.tls)))
        facts = await local
        if joins:
            facts = dataclasses.replace(facts, contract=await _measure_joined(target, diagnosis))
        return checks + _judge_machine(target, facts, diagnosis)
    finally:
        local.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await local


async def _measure_joined(target: DoctorTarget, diagnosis: Diagnosis | None) -> Contract | Failure:
    from heterorl.sampler.adoption import adopt, statement_of

    try:
        statement = None if diagnosis is None else statement_of(diagnosis)
        if statement is None:
            return Failure(kind=UNSTATED)
        config = adopt(target.model_config, statement).config
    except (ConfigError, InvalidRequest) as error:
        return machine.failure_of(error)
    measure = lambda: machine.measure_contract(config, published_dtype=target.published_dtype)  # noqa: E731
    return await in_daemon_thread(measure, timeout_s=MODEL_S)


async def _examine_link(target: DoctorTarget, wall_time: Callable[[], float]) -> tuple[list[Check], Diagnosis | None]:
    host, port = target.host, target.port
    own = None if target.tls.insecure else read_own(target.tls)
    waiting = ["port", "tls", "certificate", "expiry", "coordinator", "clock", "messages"]
    checks: list[Check] = []

    def add(check: Check) -> None:
        checks.append(check)
        if check.name in waiting:
            waiting.remove(check.name)

    def add_own(own: Identity | Failure, server: Identity | None = None) -> None:
        add(link.judge_certificate(own, role=target.role, site=target.site, server=server))
        add(link.judge_expiry(own, now=wall_time()))

    def rest(why: str) -> list[Check]:
        # This node's certificate is checked even if the coordinator does not answer.
        if own is not None:
            add_own(own)
        return checks + [skip(name, why) for name in waiting]

    proxy = "" if own is None else proxy_variable(target.address)
    past = Failure(kind="proxy", detail=f"calls go through the proxy of {proxy}")
    connected: link.Connected | Failure = past
    if proxy:
        # This machine may know neither the name nor a route.
        for name in ("dns", "port"):
            add(skip(name, past.detail))
    else:
        addresses = await link.resolve(host, port, timeout_s=CONNECT_S)
        add(link.judge_dns(host, addresses))
        if isinstance(addresses, Failure):
            return rest("the name has no address"), None
        connected = await link.connect(addresses, port, timeout_s=CONNECT_S)
        is_own = target.role is Role.COORDINATOR
        add(link.judge_port(target.address, connected, is_own=is_own))
        if isinstance(connected, Failure):
            return rest("the port was not reached"), None
    server = None
    if own is None:
        for name in ("tls", "certificate", "expiry"):
            add(skip(name, "plaintext over loopback"))
    elif isinstance(own, Failure):
        return rest("this node has no usable certificate"), None
    elif isinstance(connected, Failure):
        add(skip("tls", connected.detail))
        add_own(own)
    else:
        shaken = await link.tls_handshake(connected.address, port, host=host, tls=target.tls, timeout_s=CONNECT_S)
        add(link.judge_handshake(host, shaken))
        if isinstance(shaken, Failure):
            return rest("the handshake failed"), None
        server = shaken.server
        add_own(own, server)
    try:
        check_tls(target.tls, key="coordinator", address=target.address)
        client = DiagnosisClient(
            target.address, tls=target.tls, max_message_bytes=target.max_message_bytes, policy=RetryPolicy(budget_s=0.0)
        )
    except ConfigError as error:
        add(link.judge_answer(Failure(kind="ConfigError", detail=str(error))))
        return rest("no call was made"), None
    async with client:
        reached = await link.ask(client, count=target.num_calls, timeout_s=ANSWER_S, wall_time=wall_time)
        add(link.judge_answer(reached))
        if isinstance(reached, Failure):
            return rest("the coordinator did not answer"), None
        add(link.judge_clock(reached))
        server_limit = reached.diagnosis.max_message_bytes
        limit = min(target.max_message_bytes, server_limit)
        trials = await link.try_messages(client, limit_bytes=limit, timeout_s=MESSAGE_S)
        add(link.judge_messages(trials, own_limit=target.max_message_bytes, server_limit=server_limit))
    return checks, reached.diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    disk: machine.Disk | Failure
    memory: int | Failure
    device: machine.Device | Failure | None
    contract: Any


async def _measure_machine(target: DoctorTarget) -> _Machine:
    disk = await in_daemon_thread(lambda: machine.measure_disk(target.state_dir), timeout_s=DISK_S)
    device = None
    if target.devices[0] != "cpu":
        measured = lambda: machine.measure_devices(target.devices)  # noqa: E731
        device = await in_daemon_thread(measured, timeout_s=DEVICE_S)
    contract = None
    config = target.model_config
    if config is not None:
        measure = lambda: machine.measure_contract(config, published_dtype=target.published_dtype)  # noqa: E731
        contract = await in_daemon_thread(measure, timeout_s=MODEL_S)
    return _Machine(disk=disk, memory=machine.measure_memory(), device=device, contract=contract)


def _judge_machine(target: DoctorTarget, facts: _Machine, diagnosis: Diagnosis | None) -> list[Check]:
    files = 0 if target.model_config is None else machine.model_bytes(target.model_config.model_dir)
    state = max(files, diagnosis.bytes_full if diagnosis is not None else 0)
    sized = target.sized_as or target.role
    is_gpu = target.devices[0] != "cpu"
    checks = [
        machine.judge_disk(facts.disk, key=target.state_key, role=sized, state_bytes=state),
        machine.judge_memory(
            facts.memory, role=sized, is_on_gpu=is_gpu, state_bytes=state, pass_bytes=0 if is_gpu else target.pass_bytes
        ),
    ]
    if target.role in {Role.LEARNER, Role.SAMPLER}:
        held = int(target.copies * state)
        need = held * machine.DEVICE_TIMES[sized] + target.pass_bytes
        found = machine.judge_device(
            facts.device, device=", ".join(target.devices), role=target.role, state_bytes=held, need_bytes=need,
            pass_bytes=target.pass_bytes, share=target.memory_share,
        )  # fmt: skip
        checks.append(found)
    checks.append(
        machine.judge_versions(machine.measure_versions(target.engine), role=target.role, diagnosis=diagnosis)
    )
    if target.role in {Role.LEARNER, Role.SAMPLER}:
        checks.append(machine.judge_contract(facts.contract, diagnosis=diagnosis))
    if target.loss is not None:
        checks.append(machine.judge_loss(target.loss, max_new_tokens=target.max_new_tokens))
    if target.groups_per_version and diagnosis is not None and diagnosis.groups_per_version:
        checks.append(machine.judge_groups(target.groups_per_version, counted=diagnosis.groups_per_version))
    return checks


def read_own(tls: TlsConfig) -> Identity | Failure:
    """Identity in this node's certificate, even if expired: another check judges that."""
    try:
        check_tls(tls, key="coordinator", address="")
        identity = read_identity(Path(tls.cert).read_bytes())
        if isinstance(identity, Refusal):
            return Failure(kind="files", detail=identity.message)
        read_material(tls, number=0, now=identity.not_after)
    except (ConfigError, OSError) as error:
        return Failure(kind="files", detail=str(error))
    return identity


def read_revoked(tls: TlsConfig) -> int | Failure | None:
    """Number of certificates that a coordinator's list refuses; None without it."""
    path = getattr(tls, "revoked", "")
    if not path:
        return None
    try:
        return len(Revocations(Path(path)).current())
    except ConfigError as error:
        return Failure(kind="files", detail=str(error))
