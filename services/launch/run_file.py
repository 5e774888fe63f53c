"""Schema of run.toml: one run as its operator sees it.

Keys of only one service go into its `config` table.

It checks that hosts, sites, ports and devices fit together; each service's schema checks its own keys.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, JsonValue, ValidationInfo, field_validator, model_validator

from heterorl.common.process.address import check_database, is_loopback
from heterorl.common.process.config_file import Config
from heterorl.common.tasks.source_config import from_file

HOST = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$"
SITE = r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?){0,2}$"
PLACE = r"^(/[A-Za-z0-9._/@+-]*)?$"
MAYBE_HOST = r"^([A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?)?$"
Host = Annotated[str, Field(pattern=HOST)]
MaybeHost = Annotated[str, Field(pattern=MAYBE_HOST)]
Site = Annotated[str, Field(pattern=SITE)]
Port = Annotated[int, Field(ge=1, le=65535)]
Devices = tuple[Annotated[int, Field(ge=0)], ...]
Memory = Annotated[str, Field(pattern=r"^([1-9][0-9]{0,5}[mg])?$")]
"""An amount such as 200g or 512m, in units of 1024; empty is no limit."""
Table = dict[str, JsonValue]


def _absolute(value: str, info: ValidationInfo) -> str:
    return value if value.startswith("/") else os.path.normpath(from_file(value, info))


def _with_files(value: Any, info: ValidationInfo) -> Any:
    """The tables, their data files absolute: nodes run elsewhere."""
    if isinstance(value, list):
        return [_with_files(each, info) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_files(each, info) for key, each in value.items()}
    kind, _, path = str(found.get("name", "")).partition(":")
    if kind in ("jsonl", "parquet") and path:
        found["name"] = f"{kind}:{_absolute(path, info)}"
    held_out = found.get("evaluation_path")
    if isinstance(held_out, str) and held_out:
        found["evaluation_path"] = _absolute(held_out, info)
    return found


TaskTables = Annotated[dict[str, Any], AfterValidator(_with_files)]
"""Tables with [task]; its data files are relative to run.toml."""


class RunTable(Config):
    """Settings that all nodes of the run share."""

    id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run and of its certificate authority."""
    image: str = Field(default="heterorl", pattern=r"^[a-z0-9][a-z0-9._/:-]{0,200}$")
    """Images are IMAGE-coordinator, IMAGE-learner, IMAGE-sampler and so on; may start with a registry."""
    version: str = Field(default="local", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")
    """Tag of the images."""
    model_dir: str = Field(min_length=1, max_length=4096)
    """Hugging Face directory or hub id of the start model; a directory has the same path on every host. It is relative
    to run.toml if it begins with a dot or is there."""
    data_dirs: tuple[Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/@+-]*$")], ...] = ()
    """More directories that learner and samplers read, such as datasets; containers mount them read-only."""
    group_size: int = Field(default=8, ge=2, le=4096)
    """Rollouts of one prompt."""
    groups_per_step: int = Field(default=32, ge=1)
    """Groups of one optimizer step."""
    steps_per_version: int = Field(default=1, ge=1)
    """Optimizer steps between publications."""
    max_steps: int = Field(default=1000, ge=1)
    """Optimizer steps of the whole run."""
    use_chat_template: bool = False
    """Format prompts with the tokenizer's chat template."""
    chat_template_arguments: Table = Field(default_factory=dict)
    """Arguments of the template besides the messages."""
    task: TaskTables = Field(default_factory=dict)
    """[task] of learner and samplers."""
    sampling: Table = Field(default_factory=dict)
    """[sampling] of learner and samplers."""
    lora: Table = Field(default_factory=dict)
    """[lora] of learner and samplers."""
    loss: Table = Field(default_factory=dict)
    """[loss] of the learner."""

    @field_validator("model_dir")
    @classmethod
    def _find_model(cls, value: str, info: ValidationInfo) -> str:
        path = _absolute(value, info)
        # Another name is the hub's.
        return path if value.startswith(".") or Path(path).is_dir() else value


class PostgresTable(Config):
    """PostgreSQL as the coordinator's store, for a standby on another host."""

    url: str = Field(min_length=1, max_length=2048)
    """store.url of the coordinators, without a password."""
    standby: tuple[Host, ...] = ()
    """Hosts of standby coordinators. All share data_dir by a file system, or payloads in a bucket."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return check_database(url)


class CoordinatorTable(Config):
    """The coordinator."""

    host: Host
    """Name or address that all other nodes dial; 127.0.0.1 for a run on one host."""
    port: Port = 50051
    """Port it listens on."""
    data_dir: str = Field(default="", pattern=PLACE)
    """Directory of database and payloads; empty: the launcher chooses."""
    postgres: PostgresTable | None = None
    """PostgreSQL in place of SQLite in data_dir."""
    memory: Memory = ""
    """Memory limit; empty: 4g in a container, else the limit of the systemd unit."""
    config: dict[str, Any] = Field(default_factory=dict)
    """More keys of coordinator.toml."""

    @property
    def has_bucket(self) -> bool:
        """Whether payloads live in a bucket, so that coordinators share no data_dir."""
        payloads = self.config.get("payloads")
        return isinstance(payloads, dict) and bool(payloads.get("bucket"))


class LearnerTable(Config):
    """The learner."""

    host: MaybeHost = ""
    """Its host (of rank 0); empty: the coordinator's, or any machine of Slurm and Kubernetes."""
    nproc: int = Field(default=1, ge=1, le=64)
    """Processes of each machine, one for each GPU."""
    nnodes: int = Field(default=1, ge=1, le=1024)
    """Machines."""
    other_hosts: tuple[Host, ...] = ()
    """Hosts of the other machines; not for Slurm, which chooses them."""
    devices: Devices = ()
    """GPU numbers of its machine; empty: the first nproc."""
    backend: Table = Field(default_factory=dict)
    """[backend] of learner.toml; `device = "cuda"` requests GPUs."""
    memory: Memory = ""
    """Memory limit of its processes on one machine together; `heterorl plan` estimates it. Empty: no limit."""
    config: TaskTables = Field(default_factory=dict)
    """More keys of learner.toml."""

    @property
    def num_gpus(self) -> int:
        return self.nproc if str(self.backend.get("device", "cpu")).startswith("cuda") else 0

    @model_validator(mode="after")
    def _check_processes(self) -> LearnerTable:
        kind = self.backend.get("kind", "torch")
        if self.nproc * self.nnodes > 1 and kind == "torch":
            raise ValueError('nproc or nnodes above 1 needs backend.kind = "fsdp2" or "deepspeed"')
        if self.devices and len(self.devices) != self.num_gpus:
            raise ValueError(
                f"devices names {len(self.devices)} GPUs, and nproc with backend.device use {self.num_gpus}"
            )
        if self.other_hosts and len(self.other_hosts) != self.nnodes - 1:
            raise ValueError(f"other_hosts names {len(self.other_hosts)} hosts, and nnodes asks for {self.nnodes - 1}")
        return self


class RelayTable(Config):
    """A relay for the samplers of one site and its subsites."""

    site: Site
    """Name of the site; serves samplers of `SITE` and `SITE.*`."""
    host: Host
    """Name or address that its samplers dial."""
    port: Port = 50061
    """Port it listens on."""
    memory: Memory = ""
    """Memory limit; empty: 4g in a container, else the limit of the systemd unit."""
    config: dict[str, Any] = Field(default_factory=dict)
    """More keys of relay.toml."""


class SamplerTable(Config):
    """One sampler, or several equal ones."""

    site: Site
    """Name of the site; several samplers are SITE.1, SITE.2 and so on."""
    host: MaybeHost = ""
    """Its host; empty: the coordinator's, or any machine of Slurm and Kubernetes."""
    count: int = Field(default=1, ge=1, le=1000)
    """Number of samplers; they divide the devices."""
    devices: Devices = ()
    """GPU numbers; empty: the CPU."""
    relay: str = ""
    """Site of the relay that it dials; empty: the coordinator."""
    engine: Table = Field(default_factory=dict)
    """[engine] of sampler.toml; `kind` is hf or vllm."""
    memory: Memory = ""
    """Memory limit of each sampler's processes. Empty: no limit."""
    config: TaskTables = Field(default_factory=dict)
    """More keys of sampler.toml."""

    @property
    def sites(self) -> tuple[str, ...]:
        return (self.site,) if self.count == 1 else tuple(f"{self.site}.{n}" for n in range(1, self.count + 1))

    @model_validator(mode="after")
    def _check_devices(self) -> SamplerTable:
        if len(set(self.devices)) != len(self.devices):
            raise ValueError("devices names a GPU twice; name each once")
        if self.count > 1 and self.config.get("state_dir"):
            raise ValueError(f"config.state_dir: count = {self.count} samplers cannot share it; name them one by one")
        if len(self.devices) % self.count:
            raise ValueError(f"devices: {len(self.devices)} GPUs cannot be divided among count = {self.count} samplers")
        return self


class TlsTable(Config):
    """Security of the links."""

    directory: str = Field(default="certs", min_length=1, max_length=4096)
    """Directory of the run's authority, relative to run.toml; never on a node."""
    insecure: bool = False
    """Plaintext; allowed only if every host is loopback."""


class RunFile(Config):
    """The whole run."""

    reference: ClassVar[str] = "docs/launch.md"
    run: RunTable
    coordinator: CoordinatorTable
    learner: LearnerTable = LearnerTable()
    relays: tuple[RelayTable, ...] = ()
    samplers: tuple[SamplerTable, ...] = Field(min_length=1)
    tls: TlsTable = TlsTable()

    @property
    def hosts(self) -> tuple[str, ...]:
        standby = self.coordinator.postgres.standby if self.coordinator.postgres else ()
        named = [self.coordinator.host, *standby, self.learner.host, *self.learner.other_hosts]
        named += [*(relay.host for relay in self.relays), *(sampler.host for sampler in self.samplers)]
        return tuple(dict.fromkeys(host for host in named if host))

    @model_validator(mode="after")
    def _check_names(self) -> RunFile:
        seen: dict[str, str] = {}
        for index, site in ((n, site) for n, each in enumerate(self.samplers) for site in each.sites):
            # Service names of Kubernetes have no dots.
            flat = site.replace(".", "-")
            if flat in seen:
                raise ValueError(f"samplers[{index}].site: {site} and {seen[flat]} become the same name; rename one")
            seen[flat] = site
        flat_relays = [relay.site.replace(".", "-") for relay in self.relays]
        for index, name in enumerate(flat_relays):
            if name in flat_relays[:index]:
                raise ValueError(f"relays[{index}].site: {self.relays[index].site} has a relay already; remove one")
        return self

    @model_validator(mode="after")
    def _check_relays(self) -> RunFile:
        known = {relay.site for relay in self.relays}
        for index, sampler in enumerate(self.samplers):
            if not sampler.relay:
                continue
            if sampler.relay not in known:
                raise ValueError(f"samplers[{index}].relay: no relay has site {sampler.relay!r}; add it to [[relays]]")
            if sampler.site != sampler.relay and not sampler.site.startswith(f"{sampler.relay}."):
                raise ValueError(
                    f"samplers[{index}].relay: relay {sampler.relay} carries {sampler.relay} and {sampler.relay}.*, not"
                    f" {sampler.site}"
                )
        return self

    @model_validator(mode="after")
    def _check_places(self) -> RunFile:
        paths = [path for path in (self.run.model_dir, *self.run.data_dirs) if path.startswith("/")]
        for path in paths:
            if ".." in PurePosixPath(path).parts or path == "/":
                raise ValueError(
                    f"run: {path!r} cannot be mounted into a container; give an absolute directory without `..`, not /"
                )
        table = self.coordinator
        coordinators = [table.host, *(table.postgres.standby if table.postgres else ())]
        twice = [host for index, host in enumerate(coordinators) if host in coordinators[:index]]
        if twice:
            raise ValueError(
                f"coordinator.postgres.standby: {twice[0]} has a coordinator on that port already; name another host"
            )
        machines = [self.learner.host or table.host, *self.learner.other_hosts]
        again = [host for index, host in enumerate(machines) if host in machines[:index]]
        if again:
            raise ValueError(
                f"learner.other_hosts: {again[0]} is one of the learner's machines already; name another host"
            )
        serving = [*((host, table.port) for host in coordinators), *((each.host, each.port) for each in self.relays)]
        if len(set(serving)) != len(serving):
            raise ValueError("relays: two services share a host and port; give one of them another port")
        if table.postgres and table.postgres.standby and not (table.data_dir or table.has_bucket):
            raise ValueError(
                "coordinator.data_dir: standby coordinators share it; set a directory, or a bucket in"
                " coordinator.config.payloads"
            )
        return self

    @model_validator(mode="after")
    def _check_plaintext(self) -> RunFile:
        far = [host for host in self.hosts if not is_loopback(f"{host}:1")]
        if self.tls.insecure and far:
            raise ValueError(f"tls.insecure: plaintext needs loopback hosts, and {far[0]} is not one; remove the key")
        return self
