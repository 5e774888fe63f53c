"""A learner that loads its model already shows itself: its metrics reach the coordinator before it is ready."""

import asyncio
import re
import threading

import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.process.clock import SystemClock
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.run_servicer import MetricsServicer
from heterorl.coordinator.sites.node_metrics import NodeMetrics
from heterorl.learner import learner_app
from heterorl.v1 import metrics_pb2_grpc
from tests.support.learner_world import learner_config
from tests.support.limits import WAIT_S
from tests.support.links import PLAINTEXT


class _Shown(NodeMetrics):
    """Says when a node's first push is kept."""

    def __init__(self):
        super().__init__(run_id="run", most_nodes=4, clock=SystemClock())
        self.kept = threading.Event()

    async def put(self, service, site, found):
        kept = await super().put(service, site, found)
        self.kept.set()
        return kept


async def test_metrics_arrive_while_the_model_loads(tmp_path, monkeypatch):
    nodes = _Shown()
    server = Server(CoordinatorConfig(run_id="run", tls=PLAINTEXT))
    metrics_pb2_grpc.add_MetricsServiceServicer_to_server(MetricsServicer(nodes), server.grpc)
    port = await server.start("127.0.0.1:0")
    pages = []

    def load(*args, **options):
        assert nodes.kept.wait(WAIT_S)
        pages.append(nodes.page().decode())
        raise ConfigError("model_dir", "is not set")

    monkeypatch.setattr(learner_app, "assemble", load)
    address = {"coordinator": f"127.0.0.1:{port}", "tls": PLAINTEXT, "metrics_port": 0}
    try:
        with pytest.raises(ConfigError, match="model_dir"):
            await asyncio.wait_for(learner_app.main(learner_config(tmp_path).model_copy(update=address)), 2 * WAIT_S)
    finally:
        await server.stop(1.0)

    assert 'process_start_time_seconds{run="run",service="learner",instance="' in pages[0]
    # The alert of a learner that makes no step counts from its start.
    (shown,) = re.findall(r"^heterorl_learner_last_step_timestamp_seconds\{.*\} (.*)$", pages[0], re.MULTILINE)
    assert float(shown) > 1e9
