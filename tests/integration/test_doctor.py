"""The doctor against a real coordinator over a real socket, and against everything that is none."""

import asyncio
import contextlib
import dataclasses
import datetime
import errno
import json
import os
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from heterorl.cli.check_config import check_link
from heterorl.cli.connection import explain_link
from heterorl.cli.doctor import target_of
from heterorl.cli.main import app
from heterorl.common.errors import ConfigError, InvalidRequest
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.identity.spiffe import Role
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.clock import SystemClock
from heterorl.common.rpc.maintenance import MAX_ANSWER_BYTES, Diagnosis, DiagnosisClient
from heterorl.common.types.common import NO_LORA, Digest
from heterorl.common.wire.common_messages import to_message, to_value
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.run_servicer import RunServicer
from heterorl.doctor import link_checks, machine_checks
from heterorl.doctor.check import Failure, Level
from heterorl.doctor.examine import DoctorTarget, examine
from heterorl.doctor.link_checks import Connected, connect, in_daemon_thread
from heterorl.learner.learner_config import LearnerConfig
from heterorl.relay.relay_config import RelayConfig
from heterorl.sampler.sampler_app import load_components
from heterorl.sampler.sampler_config import SamplerConfig
from heterorl.v1 import diagnosis_pb2, run_pb2_grpc
from tests.support.certificates import Certificates, paths
from tests.support.conversations import save_chat_model
from tests.support.links import PLAINTEXT
from tests.support.ports import free_port
from tests.support.run import CONTRACT
from tests.support.secure_run import SecureRun
from tests.support.statements import stated

GOOD = "spiffe://run/site/eu-1/role/sampler"

SUMS = {"name": "arithmetic", "digits": 1}


@pytest.fixture
async def secure(tmp_path):
    async with SecureRun(tmp_path) as secure:
        yield secure


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m", seed=0, hidden_size=32, num_layers=1)


def target(address, tls, directory, **changes):
    values = {
        "role": Role.SAMPLER, "address": address, "tls": tls, "state_dir": directory / "state",
        "state_key": "state_dir", "site": "eu-1", "max_message_bytes": 2 << 20, "num_calls": 3,
    }  # fmt: skip
    return DoctorTarget(**{**values, **changes})


async def diagnose(*arguments, wall_time=time.time, **changes):
    checks = await examine(target(*arguments, **changes), wall_time=wall_time)
    return {check.name: check for check in checks}


def files(directory: Path, pair, ca):
    directory.mkdir()
    for name, data in (("ca.crt", ca), ("node.crt", pair.cert), ("node.key", pair.key)):
        (directory / name).write_bytes(data)
    return TlsConfig(**paths(directory))


async def test_everything_is_well_at_a_node_that_may_join(secure, tmp_path):
    checks = await diagnose(secure.address, secure.certificates.tls("sampler"), tmp_path)

    assert list(checks) == [
        "dns", "port", "tls", "certificate", "expiry", "coordinator", "clock", "messages",
        "disk", "memory", "gpu", "versions", "contract",
    ]  # fmt: skip
    troubled = {name for name, check in checks.items() if check.level in {Level.WARN, Level.FAIL}}
    # The certificates of tests live for a day; disks and machines are what they are.
    assert troubled - {"disk", "memory"} == {"expiry"}
    assert "run run, version 0" in checks["coordinator"].finding
    assert "main/role/coordinator" in checks["tls"].finding
    # 2 MiB less what is not padding.
    assert "up 2 MiB" in checks["messages"].finding
    assert "down 1 MiB" in checks["messages"].finding


@pytest.mark.parametrize("role", ["learner", "coordinator"])
async def test_every_role_may_ask(secure, tmp_path, role):
    site = "main" if role == "coordinator" else "eu-1"
    tls = secure.certificates.tls(role, site)
    checks = await diagnose(secure.address, tls, tmp_path, role=Role(role), site="")

    assert checks["coordinator"].level is Level.OK
    assert checks["certificate"].level is Level.OK
    assert ("contract" in checks) == (role == "learner")


async def test_learner_hears_how_many_groups_the_coordinator_counts_for_a_version(secure, tmp_path):
    tls, counted = secure.certificates.tls("learner"), secure.core.context.config.groups_per_version
    checks = await diagnose(secure.address, tls, tmp_path, role=Role.LEARNER, groups_per_version=2 * counted)

    assert checks["groups"].level is Level.WARN
    assert f"the coordinator counts {counted} (groups_per_version)" in checks["groups"].finding


async def test_closed_port_and_its_remedy(tmp_path):
    checks = await diagnose(f"127.0.0.1:{free_port()}", PLAINTEXT, tmp_path)

    assert checks["port"].level is Level.FAIL
    assert "start the coordinator" in checks["port"].remedy
    assert checks["coordinator"].level is checks["messages"].level is Level.SKIP


async def test_wrong_host_and_its_remedy(tmp_path):
    checks = await diagnose("no-such-host.invalid:1", PLAINTEXT, tmp_path)

    assert checks["dns"].level is Level.FAIL
    assert checks["port"].level is Level.SKIP


@contextlib.asynccontextmanager
async def proxy_to(port):
    """A proxy that leads every CONNECT to a port of this machine, and the requests that it got."""
    asked = []

    async def carry(source, drain):
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                drain.write(data)
                await drain.drain()
        drain.close()

    async def serve(reader, writer):
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
        inner = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(carry(reader, inner[1]), carry(inner[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    server.close()


async def test_site_that_reaches_the_coordinator_by_a_proxy_only_is_well(tmp_path, monkeypatch):
    run = SecureRun(tmp_path)
    run.certificates.authority.issue(
        role=Role.COORDINATOR, site="main", hosts=("no-such-host.invalid",), out=None, now=datetime.datetime.now(datetime.UTC),
        lifetime=datetime.timedelta(days=1),
    )  # fmt: skip
    for name in ("grpc_proxy", "http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with run, proxy_to(run.port) as (proxy, asked):
        monkeypatch.setenv("https_proxy", proxy)
        address = f"no-such-host.invalid:{run.port}"
        checks = await diagnose(address, run.certificates.tls("sampler"), tmp_path)
        closed = f"no-such-host.invalid:{free_port()}"
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{free_port()}")
        explained = await explain_link(closed, tls=run.certificates.tls("sampler"))

    assert asked[0] == address
    assert {checks[name].level for name in ("dns", "port", "tls")} == {Level.SKIP}
    assert "proxy of https_proxy" in checks["port"].finding
    assert Level.FAIL not in {checks[name].level for name in ("certificate", "coordinator", "messages")}
    assert "run run, version 0" in checks["coordinator"].finding
    # A lookup without the proxy would blame a name that only the proxy has to know.
    assert explained is None


@contextlib.contextmanager
def black_hole():
    """A port whose queue of connections is full: the kernel drops further ones without a word."""
    with socket.socket() as server, contextlib.ExitStack() as fillers:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def test_black_holed_port_ends_in_time_and_names_firewalls(tmp_path, monkeypatch):
    monkeypatch.setattr("heterorl.doctor.examine.CONNECT_S", 0.3)
    with black_hole() as address:
        checks = await diagnose(address, PLAINTEXT, tmp_path)

    assert checks["port"].level is Level.FAIL
    assert "firewalls" in checks["port"].remedy


async def test_port_that_never_shakes_hands_ends_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr("heterorl.doctor.examine.CONNECT_S", 0.3)
    tls = Certificates(tmp_path / "certs").tls("sampler")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        checks = await diagnose(f"127.0.0.1:{silent.getsockname()[1]}", tls, tmp_path)

    assert checks["tls"].level is Level.FAIL
    assert "no handshake is answered" in checks["tls"].remedy
    # Files are judged all the same.
    assert checks["certificate"].level is Level.OK


async def test_expired_certificate_and_its_remedy(secure, tmp_path):
    pair = secure.certificates.odd(uris=[GOOD], end=datetime.timedelta(hours=-1))
    checks = await diagnose(secure.address, files(tmp_path / "old", pair, secure.certificates.ca), tmp_path)

    assert checks["expiry"].level is Level.FAIL
    assert "certs renew" in checks["expiry"].remedy
    assert checks["tls"].level is Level.FAIL
    assert "it refused this node's" in checks["tls"].remedy


async def test_certificate_of_a_foreign_authority_is_told_from_a_foreign_server(secure, tmp_path):
    other = Certificates(tmp_path / "other")
    wrong_ca = await diagnose(secure.address, other.tls("sampler"), tmp_path)
    mixed = files(tmp_path / "mixed", other.pair("sampler", "eu-1"), secure.certificates.ca + other.ca)
    foreign = await diagnose(secure.address, mixed, tmp_path)

    assert "copy ca.crt" in wrong_ca["tls"].remedy
    assert "it refused this node's" in foreign["tls"].remedy


async def test_name_that_is_not_in_the_coordinators_certificate(tmp_path):
    certificates = Certificates(tmp_path / "certs")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    node = certificates.node("coordinator", "main")
    context.load_cert_chain(node / "node.crt", node / "node.key")
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.2", 0, ssl=context)
    async with server:
        address = f"127.0.0.2:{server.sockets[0].getsockname()[1]}"
        checks = await diagnose(address, certificates.tls("sampler"), tmp_path)

    assert "--host 127.0.0.2" in checks["tls"].remedy


async def test_plain_server_and_no_coordinator_are_told_apart(tmp_path):
    async def greet(_, writer):
        writer.write(b"220 hello\r\n")
        writer.close()

    certificates = Certificates(tmp_path / "certs")
    pair = certificates.odd(dns=["localhost"], usage=ExtendedKeyUsageOID.SERVER_AUTH)
    files(tmp_path / "web", pair, certificates.ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "web" / "node.crt", tmp_path / "web" / "node.key")
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as plain:
        address = f"localhost:{plain.sockets[0].getsockname()[1]}"
        first = await diagnose(address, certificates.tls("sampler"), tmp_path)
    async with await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context) as web:
        address = f"localhost:{web.sockets[0].getsockname()[1]}"
        second = await diagnose(address, certificates.tls("sampler"), tmp_path)

    assert "does not speak TLS" in first["tls"].remedy
    assert "not a coordinator" in second["tls"].remedy


async def test_revoked_certificate_passes_the_handshake_and_is_refused_after_it(secure, tmp_path):
    secure.certificates.authority.revoke(str(secure.certificates.node("sampler", "eu-1")))
    checks = await diagnose(secure.address, secure.certificates.tls("sampler"), tmp_path)

    assert checks["tls"].level is Level.OK
    assert checks["coordinator"].level is Level.FAIL
    assert "revoked" in checks["coordinator"].remedy


async def test_wrong_site_and_role(secure, tmp_path):
    tls = secure.certificates.tls("sampler")
    site = await diagnose(secure.address, tls, tmp_path, site="us-1")
    role = await diagnose(secure.address, tls, tmp_path, role=Role.LEARNER, site="")

    assert "set `site` to eu-1" in site["certificate"].remedy
    assert "role learner" in role["certificate"].remedy


@pytest.mark.parametrize(("ahead_s", "level"), [(-30.0, Level.WARN), (400.0, Level.FAIL)])
async def test_clock_that_is_off(secure, tmp_path, ahead_s, level):
    tls = secure.certificates.tls("sampler")
    checks = await diagnose(secure.address, tls, tmp_path, wall_time=lambda: time.time() + ahead_s)

    assert checks["clock"].level is level
    assert "synchronise" in checks["clock"].remedy


async def test_smaller_messages_than_the_coordinators(secure, tmp_path):
    checks = await diagnose(secure.address, secure.certificates.tls("sampler"), tmp_path, max_message_bytes=1 << 20)

    assert "set max_message_bytes to the coordinator's 2097152" in checks["messages"].remedy


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "free space there"), (errno.EROFS, "mount it writable"), (errno.EACCES, "give this user")],
)
async def test_directory_that_takes_nothing(tmp_path, monkeypatch, code, words):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(
        machine_checks.os if code == errno.ENOSPC else machine_checks.tempfile,
        {True: "fsync", False: "NamedTemporaryFile"}[code == errno.ENOSPC],
        refuse,
    )
    checks = await diagnose(f"127.0.0.1:{free_port()}", PLAINTEXT, tmp_path)

    assert checks["disk"].level is Level.FAIL
    assert words in checks["disk"].remedy
    assert list(tmp_path.iterdir()) == []


async def test_second_address_is_tried_when_the_first_is_dead():
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        found = await connect(("127.0.0.3", "127.0.0.1"), port, timeout_s=5.0)

    assert isinstance(found, Connected)
    assert found.address == "127.0.0.1"


async def test_answer_larger_than_a_mebibyte_is_refused_with_words(secure):
    client = DiagnosisClient(secure.address, tls=secure.certificates.tls("sampler"), max_message_bytes=8 << 20)
    async with client:
        with pytest.raises(InvalidRequest, match="answer_bytes"):
            await client.diagnose(answer_bytes=MAX_ANSWER_BYTES + 1)
        diagnosis = await client.diagnose(answer_bytes=MAX_ANSWER_BYTES)

    assert diagnosis.contract == secure.run.contract
    assert diagnosis.bytes_full == 80
    assert diagnosis.max_message_bytes == 2 << 20
    assert to_value(Diagnosis, to_message(diagnosis_pb2.DiagnoseResponse, diagnosis)) == diagnosis
    unstated = dataclasses.replace(diagnosis, contract=None, head_version=-1)
    assert to_value(Diagnosis, to_message(diagnosis_pb2.DiagnoseResponse, unstated)) == unstated


async def test_coordinator_of_an_older_release_is_named(tmp_path):
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), SystemClock())
    server = Server(CoordinatorConfig(max_message_bytes=2 << 20, max_concurrent_rpcs=64, run_id="run", tls=PLAINTEXT))
    run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(core.run), server.grpc)
    port = await server.start("127.0.0.1:0")
    checks = await diagnose(f"127.0.0.1:{port}", PLAINTEXT, tmp_path)
    await server.stop(0.0)
    await core.close()

    assert "same release" in checks["coordinator"].remedy


@pytest.mark.parametrize(("load", "words"), [(40.2, "; this machine is busy, load 40 on 2 cores"), (1.9, "")])
async def test_hanging_measurement_is_left_behind_and_says_a_load_that_explains_it(monkeypatch, load, words):
    monkeypatch.setattr(link_checks.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(link_checks, "num_threads", lambda _: 2)
    forever = threading.Event()
    fact = await in_daemon_thread(forever.wait, timeout_s=0.05)
    forever.set()

    assert fact == Failure(kind="timeout", detail=f"no answer in 0.05 s{words}")


async def test_wrong_model_is_named(secure, tmp_path, model_dir):
    config = SamplerConfig(model_dir=str(model_dir), group_size=2, sampling={"max_new_tokens": 8}, task=SUMS)
    checks = await diagnose(secure.address, secure.certificates.tls("sampler"), tmp_path, model_config=config)

    assert checks["contract"].level is Level.FAIL
    assert "copy the tokenizer's files" in checks["contract"].remedy

    missing = config.model_copy(update={"model_dir": str(tmp_path / "missing")})
    checks = await diagnose(secure.address, secure.certificates.tls("sampler"), tmp_path, model_config=missing)
    assert "name a Hugging Face directory" in checks["contract"].remedy
    assert "name a Hugging Face directory" not in checks["contract"].finding


async def test_short_file_is_measured_with_what_the_run_states(secure, tmp_path, model_dir):
    config = SamplerConfig(model_dir=str(model_dir), join={})
    tls = secure.certificates.tls("sampler")
    checks = await diagnose(secure.address, tls, tmp_path, model_config=config)
    assert "states no configuration" in checks["contract"].finding
    assert "leave [join] out" in checks["contract"].remedy
    checks = await diagnose(f"127.0.0.1:{free_port()}", PLAINTEXT, tmp_path, model_config=config)
    assert (checks["contract"].level, checks["contract"].finding) == (Level.SKIP, "the coordinator was not reached")

    await secure.learner.acquire_lease(
        holder="learner", contract=CONTRACT, request_id="again", statement=stated(CONTRACT)
    )
    checks = await diagnose(secure.address, tls, tmp_path, model_config=config)
    # That run's tokenizer is none, so this is as far as one gets: the group size was taken from the run.
    assert "copy the tokenizer's files" in checks["contract"].remedy

    config = SamplerConfig(model_dir=str(model_dir), join={"max_new_tokens": 1})
    refused = (await diagnose(secure.address, tls, tmp_path, model_config=config))["contract"]
    assert "this file allows 1" in refused.finding
    assert refused.remedy == "raise it if this site has room for that"


@pytest.mark.parametrize("lora", [{}, {"rank": 2, "target_modules": ["q_proj", "v_proj"]}])
def test_contract_without_weights_is_the_one_that_a_sampler_states(model_dir, tmp_path, lora):
    config = SamplerConfig(
        model_dir=str(model_dir), state_dir=tmp_path, lora=lora, sampling={"max_new_tokens": 8}, task=SUMS
    )
    stated = load_components(config).contract
    base = NO_LORA if not lora else dataclasses.replace(stated.lora, base_digest=Digest(""))

    measured = machine_checks.measure_contract(config, published_dtype="bf16")

    assert measured == dataclasses.replace(stated, lora=base)
    assert machine_checks.same_base(stated, measured) == stated


def test_contract_of_a_node_with_an_environment_is_that_of_its_sampler_or_says_what_is_missing(tmp_path):
    (tmp_path / "guess.py").write_text(
        "class Guess:\n    def reset(self, row, *, seed):\n        return 'Well?'\n\n"
        "    def step(self, action):\n        return 'So?'\n\n    def score(self):\n        return 1.0\n"
    )
    chat = save_chat_model(tmp_path / "chat")
    config = SamplerConfig(
        model_dir=str(chat), state_dir=tmp_path, use_chat_template=True, sampling={"max_new_tokens": 8},
        task={"name": "seeds", "environment": "guess:Guess", "environment_path": str(tmp_path), "max_turns": 5},
    )  # fmt: skip
    parts = load_components(config)
    parts.close()

    assert machine_checks.measure_contract(config, published_dtype="bf16") == parts.contract
    assert parts.contract.max_turns == 5

    (chat / "chat_template.jinja").unlink()
    assert "has no chat template" in machine_checks.measure_contract(config, published_dtype="bf16").detail


def test_memory_is_the_least_of_machine_and_control_group(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4000 kB\n")
    assert machine_checks.measure_memory(tmp_path) == 4000 * 1024

    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("400000\n")
    assert machine_checks.measure_memory(tmp_path) == 600_000
    (group / "memory.stat").write_text("anon 90000\ninactive_file 100000\nactive_file 200000\n")
    assert machine_checks.measure_memory(tmp_path) == 900_000
    (group / "memory.max").write_text("max\n")
    assert machine_checks.measure_memory(tmp_path) == 4000 * 1024
    assert isinstance(machine_checks.measure_memory(tmp_path / "none"), Failure)


def test_command_shows_json_guesses_the_role_and_ends_with_1(tmp_path):
    path = tmp_path / "learner.toml"
    path.write_text(
        f'coordinator = "127.0.0.1:{free_port()}"\nstate_dir = "{tmp_path}"\nmax_steps = 3\n[tls]\ninsecure = true\n'
        '[loss]\nkind = "gepo_whole"\n[sampling]\nmax_new_tokens = 4000\n'
    )
    result = CliRunner().invoke(app, ["doctor", "--config", str(path), "--json"])

    shown = json.loads(result.output)
    assert result.exit_code == 1
    assert shown["is_ok"] is False
    levels = {row["name"]: row["level"] for row in shown["checks"]}
    assert (levels["port"], levels["loss"]) == ("fail", "warn")
    table = CliRunner().invoke(app, ["doctor", "--config", str(path)])
    assert "doctor: learner" in table.output
    assert set(LearnerConfig.model_fields) >= {"max_steps"}

    (tmp_path / "odd.toml").write_text("data_dir = 'x'\nmax_steps = 3\n")
    odd = CliRunner().invoke(app, ["doctor", "--config", str(tmp_path / "odd.toml")])
    assert "data_dir: unknown key; did you mean state_dir?" in str(odd.exception)
    (tmp_path / "odd.toml").write_text("colour = 1\n")
    odd = CliRunner().invoke(app, ["doctor", "--config", str(tmp_path / "odd.toml")])
    assert "no service has its keys (pass the node's file, or --role" in str(odd.exception)


def test_coordinator_that_is_not_started_is_no_failure(tmp_path):
    path = tmp_path / "coordinator.toml"
    path.write_text(f'listen = "127.0.0.1:{free_port()}"\ndata_dir = "{tmp_path}"\nseed = 1\n[tls]\ninsecure = true\n')
    result = CliRunner().invoke(app, ["doctor", "--config", str(path), "--role", "coordinator", "--json"])

    port = next(row for row in json.loads(result.output)["checks"] if row["name"] == "port")
    assert port["level"] == "warn"


def test_node_of_two_coordinators_is_checked_against_the_one_that_listens(tmp_path, monkeypatch):
    asked = []

    async def look(target):
        asked.append(target.address)
        return []

    monkeypatch.setattr("heterorl.doctor.examine.examine", look)
    path = tmp_path / "relay.toml"
    with socket.create_server(("127.0.0.1", 0)) as active, socket.socket() as standing_by:
        # Bound, but not listening: a connection is refused.
        standing_by.bind(("127.0.0.1", 0))
        first, second = (f"127.0.0.1:{each.getsockname()[1]}" for each in (standing_by, active))
        for pair in ([first, second], [first, first]):
            path.write_text(f"coordinator = {json.dumps(pair)}\ncache_dir = 'c'\n[tls]\ninsecure = true\n")
            result = CliRunner().invoke(app, ["doctor", "--config", str(path), "--role", "relay"])
            assert result.exit_code == 0, result.exception

    assert asked == [second, first]


def test_relay_of_two_coordinators_asks_the_first(tmp_path):
    config = RelayConfig(coordinator="127.0.0.1:1,127.0.0.2:1", cache_dir=tmp_path, tls={"insecure": True})

    check_link("relay", config)
    target = target_of("relay", config)

    assert (target.address, target.host, target.port) == ("127.0.0.1:1", "127.0.0.1", 1)
    with pytest.raises(ConfigError, match="tls.insecure"):
        check_link("relay", config.model_copy(update={"coordinator": "127.0.0.1:1,coord.example:1"}))
