"""A run from one run.toml: the commands of its units as processes, over certificates that its own script made."""

import asyncio
import tomllib

import pytest

from heterorl.common.identity.tls import TlsConfig, files_in
from heterorl.common.rpc.client import CoordinatorClient
from tests.support.cluster import Cluster
from tests.support.machine import Machine, rendered, units
from tests.support.ports import free_port

HOST = "127.0.0.1"


def _is_done(status):
    # Two versions may be made of one sampler's groups before the other one has started.
    return status.head_version == 2 and len(status.sites) == 2


@pytest.mark.slow
async def test_units_of_one_run_file_train_two_versions_over_certificates(tmp_path):
    cluster = Cluster(tmp_path)
    port, relay_port = free_port(), free_port()
    run = {
        "run": {
            "id": "launched", "model_dir": str(cluster.model_dir), "group_size": 2, "groups_per_step": 4, "max_steps": 2,
            "task": {"name": "arithmetic", "digits": 1}, "sampling": {"max_new_tokens": 3},
        },
        "coordinator": {"host": HOST, "port": port, "config": {"metrics_port": 0}},
        "learner": {"backend": {"lr": 1e-3, "threads": 1}, "config": {"metrics_port": 0}},
        "relays": [{"site": "eu", "host": HOST, "port": relay_port, "config": {"metrics_port": 0}}],
        "samplers": [
            {
                "site": "eu", "count": 2, "relay": "eu", "engine": {"threads": 1, "batch_rows": 16},
                "config": {"metrics_port": 0, "heartbeat_s": 0.5},
            }
        ],
        "tls": {"directory": str(tmp_path / "authority")},
    }  # fmt: skip
    tree = rendered(run, tmp_path)

    machine = Machine(tree, tmp_path)
    started = units(tree)
    assert started == [
        f"heterorl-{name}.service" for name in ("coordinator", "relay-eu", "learner", "sampler-eu-1", "sampler-eu-2")
    ]
    try:
        for unit in started:
            machine.start(unit)
        async with CoordinatorClient(f"{HOST}:{port}", tls=TlsConfig(**files_in(tree / "operator"))) as client:
            status = await cluster.until(client, _is_done)
    except (TimeoutError, asyncio.CancelledError):
        pytest.fail(machine.said())
    finally:
        machine.stop()

    assert status.head_version == 2
    assert {site.site for site in status.sites} == {"eu.1", "eu.2"}
    assert tomllib.loads((machine.etc / "heterorl" / "sampler-eu-1.toml").read_text())["coordinator"].endswith(
        str(relay_port)
    )
