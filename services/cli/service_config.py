"""The configuration file of a service, by the service's name: its schema, and whose file one is."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from heterorl.common.errors import ConfigError
from heterorl.common.process.config import Config, InvalidConfig, flatten, load, read_tables
from heterorl.common.process.config_words import all_keys

Service = Literal["coordinator", "learner", "sampler", "relay"]
_SCHEMAS: dict[Service, tuple[str, str]] = {
    "sampler": ("heterorl.sampler.config", "SamplerConfig"),
    "learner": ("heterorl.learner.config", "LearnerConfig"),
    "coordinator": ("heterorl.coordinator.config", "CoordinatorConfig"),
    "relay": ("heterorl.relay.config", "RelayConfig"),
}


def schema_of(service: Service) -> type[Config]:
    """The schema of a service's configuration; imported when it is asked for."""
    module, name = _SCHEMAS[service]
    schema: type[Config] = getattr(importlib.import_module(module), name)
    return schema


def load_service(service: Service, path: Path | None, overrides: Sequence[str] = ()) -> Any:
    """Read, merge and check a service's configuration.

    Raises:
        InvalidConfig: keys are unknown, or values out of bounds; names every one by its path.
        ConfigError: a file or an override cannot be read, or the file is another service's.
    """
    try:
        return load(schema_of(service), path, overrides)
    except InvalidConfig as error:
        table, _ = read_tables(path, ())
        other = owner(table)
        if path is None or other == service or 2 * num_unknown(other, table) >= num_unknown(service, table):
            raise
        action = f"name it to {other}, or give {service} its own"
        raise ConfigError("--config", f"{path} is the file of a {other}, not of a {service}", action=action) from error


def owner(table: dict[str, Any]) -> Service:
    """The service that knows most keys of a table; of several a sampler, then a learner, a coordinator, a relay."""
    return min(_SCHEMAS, key=lambda service: num_unknown(service, table))


def num_unknown(service: Service, table: dict[str, Any]) -> int:
    """How many keys of a table a service does not know."""
    known = set(all_keys(schema_of(service)))
    return sum(key not in known for key in flatten(table))
