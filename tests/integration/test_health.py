"""`heterorl health`: what a container's or a load balancer's check sees."""

import asyncio
import functools
import socket

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from heterorl.cli.main import app
from heterorl.common.rpc.channel import check_health
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.rpc.grpc_server import Server
from tests.support.certificates import Certificates
from tests.support.links import PLAINTEXT


async def ask(address, *options):
    """Run the command as a user does: it has a loop of its own."""
    command = functools.partial(CliRunner().invoke, app, ["health", address, "--timeout", "5", *options])
    return await asyncio.to_thread(command)


@pytest.fixture
async def server():
    started = Server(CoordinatorConfig(max_message_bytes=4 << 20, max_concurrent_rpcs=8, run_id="run", tls=PLAINTEXT))
    port = await started.start("127.0.0.1:0")
    yield started, f"127.0.0.1:{port}"
    await started.stop(0)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("health") / "ca")


@pytest.fixture
async def secure_address(certificates):
    started = Server(
        CoordinatorConfig(max_message_bytes=4 << 20, max_concurrent_rpcs=8, run_id="run", tls=certificates.server_tls())
    )
    port = await started.start("127.0.0.1:0")
    yield f"127.0.0.1:{port}"
    await started.stop(0)


def files_of(certificates, role):
    return ["--credentials", str(certificates.node(role, "main"))]


async def test_server_that_serves_is_healthy(server):
    _, address = server

    result = await ask(address, "--insecure")

    assert result.exit_code == 0
    assert result.stdout == f"{address}: SERVING\n"


async def test_of_two_coordinators_one_serves_and_the_other_stands_by(server):
    _, address = server

    result = await ask(f"127.0.0.1:1,{address}", "--insecure")

    assert (result.exit_code, result.stdout) == (0, f"{address}: SERVING\n")


@pytest.mark.parametrize("role", ["coordinator", "operator"])
async def test_server_with_certificates_is_healthy_to_any_certificate_of_the_run(secure_address, certificates, role):
    result = await ask(secure_address, *files_of(certificates, role))

    assert (result.exit_code, result.stdout) == (0, f"{secure_address}: SERVING\n")


async def test_check_of_this_machine_goes_through_no_proxy(secure_address, certificates, monkeypatch):
    with socket.socket() as deaf:
        # Bound, and deaf: a call that dialled it would have no answer.
        deaf.bind(("127.0.0.1", 0))
        for name in ("https_proxy", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{deaf.getsockname()[1]}")

        result = await ask(secure_address, *files_of(certificates, "operator"))

    assert (result.exit_code, result.stdout) == (0, f"{secure_address}: SERVING\n")


async def test_check_without_certificates_or_with_another_runs_learns_nothing(secure_address, tmp_path):
    foreign = Certificates(tmp_path / "ca", run="other")

    plain = await ask(secure_address, "--insecure")
    other = await ask(secure_address, *files_of(foreign, "coordinator"))
    neither = await ask(secure_address)
    remote = await ask("10.0.0.1:1", "--insecure")

    assert (plain.exit_code, other.exit_code) == (1, 1)
    assert plain.stdout == other.stdout == ""
    assert "--credentials: is not set" in str(neither.exception)
    assert "plaintext is for loopback only" in str(remote.exception)


async def test_server_that_stopped_is_not(server):
    started, address = server
    await started.stop(0)

    result = await ask(address, "--insecure")

    assert result.exit_code == 1
    assert result.stdout == ""
    assert f"{address} refuses" in result.stderr


async def test_server_that_is_stopping_is_not(server):
    state = health.aio.HealthServicer()
    await state.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    stopping = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(state, stopping)
    port = stopping.add_insecure_port("127.0.0.1:0")
    await stopping.start()

    answer = await check_health(f"127.0.0.1:{port}", tls=PLAINTEXT, timeout_s=5.0)
    await stopping.stop(0)

    assert (answer.is_serving, answer.reason) == (False, f"127.0.0.1:{port}: NOT_SERVING")


async def test_server_that_never_answers_is_not():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()

        answer = await check_health(f"127.0.0.1:{silent.getsockname()[1]}", tls=PLAINTEXT, timeout_s=0.2)

    assert not answer.is_serving
