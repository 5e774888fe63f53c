"""Metrics that nodes push, at a real coordinator under a real Prometheus: one node cannot take the page from the others."""

import asyncio
import dataclasses
import urllib.request

import grpc.aio
import pytest

from deploy.grafana.panels import BOARDS
from heterorl.common.process import metrics
from heterorl.common.process.pushed_metrics import series_of
from heterorl.common.wire.common_messages import new_message
from heterorl.v1 import metrics_pb2, metrics_pb2_grpc
from tests.support.certificates import Certificates
from tests.support.cluster import Cluster
from tests.support.limits import WAIT_S
from tests.support.prometheus import PROMETHEUS, metrics_port, start_prometheus

RPCS = "heterorl_rpc_seconds_count"
HOSTILE = {
    "label-twice": 'code="1",code="2",method="m",side="s"',
    "another-name": '__name__="up",code="1",method="m",side="s"',
    "another-site": 'code="1",method="m",side="s",site="good"',
    "a-zero": 'code="\0",method="m",side="s"',
    "a-line": 'code="1"} 1\nup{code="1"',
    "undeclared": 'code="1",colour="blue",method="m",side="s"',
    "other-order": 'side="s",method="m",code="1"',
    "no-label": "",
    "odd": 'code="\r\t\u2028\ufffe",method="m",side="\\"\\\\\\n"',
}


async def served(child):
    while (port := metrics_port(child.log)) is None:
        child.check()
        await asyncio.sleep(0.05)
    return port


async def seen(ask):
    while not (found := await asyncio.to_thread(ask)):  # noqa: ASYNC110 - another process finds it
        await asyncio.sleep(0.2)
    return found


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: make programs")
async def test_no_push_of_one_site_takes_the_page_from_the_others(tmp_path):
    cluster = Cluster(tmp_path)
    port = await served(cluster.start("coordinator"))
    target = {"targets": [f"127.0.0.1:{port}"], "labels": {"run": "kills", "service": "coordinator"}}
    server = start_prometheus(tmp_path / "prometheus", [target])
    try:
        async with grpc.aio.insecure_channel(cluster.address) as channel:
            stub = metrics_pb2_grpc.MetricsServiceStub(channel)

            async def push(site, labels, *, count=1, name=RPCS):
                one = metrics_pb2.MetricSeries(name=name, labels=[labels] * count, values=[1.0] * count)
                request = metrics_pb2.PushSamplerMetricsRequest(site=site, series=[one])
                answer = stub.PushSamplerMetrics(request, timeout=WAIT_S)
                code = await answer.code()
                assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
                return code is grpc.StatusCode.OK

            answers = {}
            for site, labels in HOSTILE.items():
                answers[site] = await push(site, labels)
            assert not await push("too-many", 'code="1",method="m",side="s"', count=9000)
            # All that a sampler has, as it sends it, but for the labels that other tests of this process have left.
            registry = metrics.registry_of("sampler")
            series = [
                dataclasses.replace(one, labels=one.labels[:20], values=one.values[:20]) for one in series_of(registry)
            ]
            request = new_message(metrics_pb2.PushSamplerMetricsRequest, site="good", series=list(series))
            assert (await stub.PushSamplerMetrics(request, timeout=WAIT_S)).is_kept
            assert await push("last", 'code="1",method="m",side="s"')

        # What was pushed last is there, so Prometheus took a page that had all of it.
        await seen(lambda: server.query(f'{RPCS}{{site="last"}}'))
        assert server.query('up{job="heterorl-nodes"}')[0]["value"][1] == "1"
        assert server.query('process_start_time_seconds{job="heterorl-nodes",site="good"}')
        assert {
            row["metric"]["site"]
            for row in server.query(f'{{__name__="{RPCS}",code!="OK",site!="good"}}')
            if "site" in row["metric"]
        } == {"last", "odd"}
        assert sorted(site for site, is_taken in answers.items() if is_taken) == [
            "no-label",
            "odd",
            "other-order",
            "undeclared",
        ]
    finally:
        server.close()
        cluster.stop()


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: make programs")
async def test_relay_hands_its_metrics_out_and_its_panels_have_data(tmp_path):
    certificates = Certificates(tmp_path / "certs", run="kills")
    cluster = Cluster(tmp_path, certificates=certificates, relay={"metrics_push_s": 0.6})
    port = await served(cluster.start("coordinator"))
    target = {"targets": [f"127.0.0.1:{port}"], "labels": {"run": "kills", "service": "coordinator"}}
    server = start_prometheus(tmp_path / "prometheus", [target])
    try:
        cluster.start("relay")
        panels = {panel.title: panel.queries[0].expr for board in BOARDS for panel in board.panels}
        # Reads are counted when there are some.
        for title in ("Payload bytes of relays", "Cache of relays", "Calls at relays"):
            asked = panels[title].replace("$window", "5m").replace("$run", ".*")
            await seen(lambda asked=asked: server.query(asked))
        (row,) = server.query("heterorl_relay_calls")
        found = {key: row["metric"][key] for key in ("run", "service", "site", "instance")}
        assert found == {"run": "kills", "service": "relay", "site": "eu", "instance": "eu"}
        page = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/nodes", timeout=WAIT_S).read()
        )
        assert b"heterorl_sampler_" not in page
    finally:
        server.close()
        cluster.stop()
