"""The command `heterorl doctor`."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from heterorl.cli.check_config import ConfigOption, Service, SetOption, load_service, num_unknown, owner
from heterorl.cli.connection import console_of
from heterorl.common.errors import ConfigError
from heterorl.common.identity.tls import files_in
from heterorl.common.process.address import addresses
from heterorl.common.process.config_file import flatten, quoted, read_tables
from heterorl.common.process.files import EVERY_HOST
from heterorl.common.types.common import strict_json


def doctor(
    config: ConfigOption = None,
    role: Annotated[
        Service | None, typer.Option(help="Role of the node; default: the one whose keys the file has.")
    ] = None,
    set_: SetOption = None,
    credentials: Annotated[
        Path | None, typer.Option(help="Directory of ca.crt, node.crt and node.key, in place of [tls].")
    ] = None,
    calls: Annotated[int, typer.Option(help="Calls over which the round trip is measured.", min=1, max=1000)] = 10,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Check a node before it joins a run.

    It checks link, certificates, clock, disk, memory, device, versions and contract.

    Exit code 0: no check failed (warnings may need a look). 1: a check failed; its line says what to do. 2: the
    configuration is wrong.

    Example: `heterorl doctor --config sampler.toml`
    """
    from heterorl.common.identity.spiffe import Role
    from heterorl.common.rpc.channel import listening_one
    from heterorl.doctor.check import Check, checks_json, checks_table, exit_code
    from heterorl.doctor.examine import examine

    overrides = list(set_ or ())
    if credentials is not None:
        overrides += [f"tls.{key}={quoted(path)}" for key, path in files_in(credentials).items()]
    chosen = role or guess_role(config, overrides)
    loaded = load_service(chosen, config, overrides)
    target = target_of(chosen, loaded, num_calls=calls)

    async def look() -> list[Check]:
        # One of several coordinators serves; the others stand by and listen on no port.
        address = target.address if chosen == "coordinator" else await listening_one(loaded.coordinator)
        return await examine(dataclasses.replace(target, address=address))

    checks = asyncio.run(look())
    if json_:
        typer.echo(strict_json(checks_json(checks), indent=2))
    else:
        console = console_of()
        console.print(checks_table(checks, title=f"heterorl doctor: {Role(chosen)}"))
    raise typer.Exit(exit_code(checks))


def guess_role(config: Path | None, overrides: list[str] | tuple[str, ...]) -> Service:
    """The service that knows most keys; raises ConfigError if none does."""
    table, _ = read_tables(config, overrides)
    role = owner(table)
    if num_unknown(role, table) == len(flatten(table)):
        action = "pass the node's file, or --role for the defaults"
        problem = "no service has its keys" if table else "has no keys" if config else "is not set"
        raise ConfigError("--config", problem, action=action)
    return role


def target_of(role: str, config: Any, *, num_calls: int = 10) -> Any:
    """Keys that the doctor reads from a configuration."""
    from heterorl.common.identity.spiffe import Role
    from heterorl.doctor.examine import MESSAGE_BYTES, DoctorTarget
    from heterorl.doctor.machine_checks import measure_versions, pass_bytes

    state_key = {"coordinator": "data_dir", "relay": "cache_dir"}.get(role, "state_dir")
    target = DoctorTarget(
        role=Role(role),
        address=_dialled(config) if role == "coordinator" else addresses(config.coordinator)[0],
        tls=config.tls,
        state_dir=getattr(config, state_key),
        state_key=state_key,
        max_message_bytes=MESSAGE_BYTES if role == "sampler" else config.max_message_bytes,
        num_calls=num_calls,
    )
    if role in ("coordinator", "relay"):
        return target
    engine = config.engine if role == "sampler" else config.backend
    numbered = tuple(f"cuda:{number}" for number in getattr(engine, "devices", ()))
    # A CPU's build of vLLM or torch is named so.
    device = getattr(engine, "device", "cpu" if re.search(r"[+.]cpu\b", str(measure_versions("vllm"))) else "cuda")
    return dataclasses.replace(
        target,
        site=config.site if role == "sampler" else "",
        devices=numbered or (device,),
        copies=getattr(engine, "engines", int(engine.kind == "torch")) / getattr(engine, "tensor_parallel_size", 1),
        memory_share=getattr(engine, "memory_share", 0.0) * getattr(engine, "engines", 1),
        pass_bytes=pass_bytes(config.model_dir, config.backend) if role == "learner" else 0,
        sized_as=Role.SAMPLER if config.lora.is_on else None,
        engine=engine.kind if engine.kind in ("vllm", "deepspeed") else "",
        published_dtype=config.published_dtype if role == "sampler" else config.backend.published_dtype,
        model_config=config if config.model_dir else None,
        loss=config.loss if role == "learner" else None,
        max_new_tokens=config.drawn_semantics().max_new_tokens if role == "learner" else 0,
        groups_per_version=config.groups_per_step * config.steps_per_version if role == "learner" else 0,
    )


def _dialled(config: Any) -> str:
    try:
        announced = (config.data_dir / "address").read_text(encoding="ascii").strip()
    except OSError:
        announced = config.listen
    listen = announced if config.listen.endswith(":0") else config.listen
    host, _, port = listen.rpartition(":")
    return f"{'127.0.0.1' if host in EVERY_HOST else host}:{port}"
