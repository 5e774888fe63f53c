"""Real certificates over real sockets: who is let in, who is refused as what, and that nobody else notices."""

import asyncio
import datetime
import os
import re
import shutil
import socket
import ssl
import struct
import sys

import grpc.aio
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from heterorl.certs.authority import Pair, make_authority
from heterorl.common.errors import ConfigError, PermissionDenied, Unauthenticated, Unreachable
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.clock import SystemClock
from heterorl.common.rpc import calls
from heterorl.common.rpc.calls import RetryPolicy
from heterorl.common.rpc.channel import stubs_of
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.coordinator.rpc.grpc_server import Server
from heterorl.coordinator.servicers.run_servicer import RunServicer
from heterorl.v1 import policy_pb2, rollout_pb2, run_pb2, run_pb2_grpc
from tests.support.certificates import DAY, Certificates, now, paths
from tests.support.groups import group_to_pb, push_of
from tests.support.links import PLAINTEXT
from tests.support.run import INCARNATION, SITE, credits_of
from tests.support.secure_run import SecureRun, refusals

GOOD = "spiffe://run/site/eu-1/role/sampler"
HEARTBEAT = run_pb2.HeartbeatRequest(site=SITE, incarnation=INCARNATION)
QUICK = RetryPolicy(budget_s=0.3, base_s=0.01, cap_s=0.05)


@pytest.fixture(scope="module")
def issued(tmp_path_factory):
    """What every test starts from, made once: each file costs two fsyncs."""
    certificates = Certificates(tmp_path_factory.mktemp("issued") / "certs")
    for role, site in (("coordinator", "main"), ("learner", SITE), ("sampler", SITE), ("operator", SITE)):
        certificates.node(role, site)
    return certificates.directory


@pytest.fixture
async def secure(tmp_path, issued):
    shutil.copytree(issued, tmp_path / "certs")
    async with SecureRun(tmp_path) as secure:
        yield secure


async def test_each_role_does_its_part_over_certificates(secure):
    ids = await secure.run.push(2)
    groups = secure.learner.stream_groups(epoch=secure.run.epoch, held=(), credits=credits_of(2))
    received = [(await anext(groups)).group.id, (await anext(groups)).group.id]
    await groups.aclose()
    await secure.run.publish(consumed=ids)

    status = await secure.operator.get_status()
    assert received == ids
    assert (status.head_version, status.ledger.consumed) == (1, 2)
    assert [report.step for report in await secure.operator.list_steps(after_step=0, limit=5)] == [1]
    assert await secure.operator.rollback(to_version=0, request_id="back") == 1
    with pytest.raises(PermissionDenied):
        await secure.learner.rollback(to_version=0, request_id="again")
    await secure.operator.drain(reason="done")


def _revoked(certificates: Certificates) -> Pair:
    pair = certificates.pair("sampler", "thief")
    certificates.authority.revoke(str(certificates.node("sampler", "thief")))
    return pair


def _of_other_authority(certificates: Certificates) -> Pair:
    return Certificates(certificates.directory / "other").pair("sampler", "eu-1")


CASES = {
    "wrong role": (lambda c: c.pair("sampler", "eu-1"), "RenewLease", PermissionDenied, "role"),
    "operator as learner": (lambda c: c.pair("operator", "eu-1"), "RenewLease", PermissionDenied, "role"),
    "learner as sampler": (lambda c: c.pair("learner", "eu-1"), "Heartbeat", PermissionDenied, "role"),
    "coordinator as sampler": (lambda c: c.pair("coordinator", "main"), "Heartbeat", PermissionDenied, "role"),
    "wrong site": (lambda c: c.pair("sampler", "us-1"), "Heartbeat", PermissionDenied, "site"),
    "wrong run": (
        lambda c: c.odd(uris=["spiffe://other/site/eu-1/role/sampler"]), "Heartbeat", PermissionDenied, "run",
    ),
    "two URIs": (
        lambda c: c.odd(uris=[GOOD, "spiffe://run/site/us-1/role/sampler"]), "Heartbeat", Unauthenticated, "no_identity",
    ),
    "the same URI twice": (lambda c: c.odd(uris=[GOOD, GOOD]), "Heartbeat", Unauthenticated, "no_identity"),
    "a second URI of another scheme": (
        lambda c: c.odd(uris=[GOOD, "https://example.org"]), "Heartbeat", Unauthenticated, "no_identity",
    ),
    "no names, a common name like a URI": (lambda c: c.odd(), "Heartbeat", Unauthenticated, "no_identity"),
    "a DNS name like a URI": (lambda c: c.odd(dns=[GOOD]), "Heartbeat", Unauthenticated, "no_identity"),
    "unknown role": (
        lambda c: c.odd(uris=["spiffe://run/site/eu-1/role/root"]), "Heartbeat", Unauthenticated, "no_identity",
    ),
    "a URI that goes on": (lambda c: c.odd(uris=[GOOD + "/x"]), "Heartbeat", Unauthenticated, "no_identity"),
    "a line break at the end": (lambda c: c.odd(uris=[GOOD + "\n"]), "Heartbeat", Unauthenticated, "no_identity"),
    "revoked": (_revoked, "GetStatus", Unauthenticated, "revoked"),
    "expired": (lambda c: c.odd(uris=[GOOD], end=-DAY / 2), "Heartbeat", Unreachable, None),
    "not valid yet": (lambda c: c.odd(uris=[GOOD], begin=DAY / 2), "Heartbeat", Unreachable, None),
    "for servers only": (
        lambda c: c.odd(uris=[GOOD], usage=ExtendedKeyUsageOID.SERVER_AUTH), "Heartbeat", Unreachable, None,
    ),
    "other authority": (_of_other_authority, "Heartbeat", Unreachable, None),
    "no certificate": (lambda c: Pair(cert=b"", key=b""), "Heartbeat", Unreachable, None),
    "plaintext": (lambda c: None, "Heartbeat", Unreachable, None),
}  # fmt: skip
REQUESTS = {
    "Heartbeat": HEARTBEAT,
    "RenewLease": policy_pb2.RenewLeaseRequest(epoch=1),
    "GetStatus": run_pb2.GetStatusRequest(),
}


async def test_every_wrong_certificate_is_refused_and_nobody_else_notices(secure):
    watch = secure.sampler.watch_head(after_version=-1)
    assert (await anext(watch)).version == 0
    for name, (make, method, error_class, reason) in CASES.items():
        before = refusals()
        error = await secure.attempt(make(secure.certificates), method, REQUESTS[method])

        assert type(error) is error_class, (name, error)
        counted = {key: value - before.get(key, 0.0) for key, value in refusals().items()}
        assert {key for key, value in counted.items() if value} == ({reason} if reason else set()), name
        assert (await secure.operator.get_status()).sites[0].site == SITE
    await secure.run.publish()

    assert (await anext(watch)).version == 1
    await watch.aclose()


async def test_a_sampler_speaks_for_no_other_site(secure):
    requests = {
        "Register": run_pb2.RegisterRequest(site="us-1"),
        "Heartbeat": run_pb2.HeartbeatRequest(site="us-1"),
        "LeaseWork": rollout_pb2.LeaseWorkRequest(site="us-1"),
        "AbandonWork": rollout_pb2.AbandonWorkRequest(site=""),
    }

    for method, request in requests.items():
        error = await secure.attempt(secure.certificates.pair("sampler", SITE), method, request)
        assert type(error) is PermissionDenied, method


async def test_groups_before_one_of_another_site_are_kept_and_the_stream_ends_typed(secure):
    (first, second) = await secure.run.lease(2)
    foreign = group_to_pb(secure.run.group(second))
    foreign.id.site = "us-1"
    own = push_of(group_to_pb(secure.run.group(first)))
    pair = secure.certificates.pair("sampler", "eu-1")
    answers = []

    error = await secure.attempt(pair, "PushGroups", iter([own, push_of(foreign)]), answers=answers)

    assert type(error) is PermissionDenied
    assert (await secure.operator.get_status()).ledger.acked == len(answers) == 1


async def test_group_that_comes_after_the_revocation_is_not_taken(secure):
    messages = [push_of(group_to_pb(secure.run.group(work))) for work in await secure.run.lease(2)]
    pair = secure.certificates.pair("sampler", SITE)
    credentials = grpc.ssl_channel_credentials(secure.certificates.ca, pair.key, pair.cert)
    async with grpc.aio.secure_channel(secure.address, credentials) as channel:
        push = stubs_of(channel)["PushGroups"]()
        await push.write(messages[0])
        await push.read()
        secure.certificates.authority.revoke(f"{secure.certificates.identity('sampler', SITE).serial:x}")
        await push.write(messages[1])

        assert await push.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (await secure.operator.get_status()).ledger.acked == 1


async def test_revocation_ends_calls_and_open_streams_at_once(secure):
    watch = secure.sampler.watch_head(after_version=-1)
    await anext(watch)
    secure.certificates.authority.revoke(f"{secure.certificates.identity('sampler', SITE).serial:x}")

    with pytest.raises(Unauthenticated, match="revoked"):
        await secure.run.lease(1)
    await secure.run.publish()
    with pytest.raises(Unauthenticated, match="revoked"):
        await anext(watch)
    # As the coordinator's loop does every few seconds.
    await secure.core.run.note_revoked(secure.server.revoked_serials(), secure.server.authorizer.serials)
    # A restart of the coordinator forgets who called, and not who was revoked; the list may take it back.
    for serials, is_revoked in ((secure.server.revoked_serials(), True), (frozenset(), False)):
        await secure.core.run.note_revoked(serials, {})
        status = await secure.operator.get_status()
        assert status.head_version == 1
        assert [(site.is_revoked, "is revoked" in site.problem) for site in status.sites] == [(is_revoked,) * 2]


async def test_damaged_or_missing_list_takes_no_revocation_back(secure):
    certificates = secure.certificates
    certificates.authority.revoke(f"{certificates.identity('sampler', SITE).serial:x}")
    with pytest.raises(Unauthenticated):
        await secure.run.lease(1)

    for damage in (lambda path: path.write_text("not hexadecimal\n"), lambda path: path.unlink()):
        damage(certificates.authority.revoked_path)
        with pytest.raises(Unauthenticated):
            await secure.run.lease(1)
    certificates.authority.revoked_path.write_text("# nobody\n")
    assert len(await secure.run.lease(1)) == 1


async def test_certificate_that_expires_on_an_open_link_is_refused_and_worth_repeating(secure, monkeypatch, caplog):
    monkeypatch.setattr(calls, "SAY_AFTER_S", 0.0)
    watch = secure.sampler.watch_head(after_version=-1)
    await anext(watch)
    secure.ahead_s = 2 * 86400.0

    with pytest.raises(Unauthenticated, match="expired") as refused:
        await secure.run.lease(1)
    assert refused.value.retry_after_s > 0
    assert re.search("has refused this node for 0 s, retrying: the certificate of .* has expired", caplog.text)
    await _publish_at(secure, 0.0)
    secure.ahead_s = 2 * 86400.0
    with pytest.raises(Unauthenticated, match="expired"):
        await anext(watch)


async def _publish_at(secure, ahead_s):
    secure.ahead_s = ahead_s
    request = await secure.run.prepare()
    secure.ahead_s = 2 * 86400.0
    await secure.core.publish_version(request)


async def test_rotation_drops_no_call_on_either_side(secure):
    certificates = secure.certificates
    watch = secure.sampler.watch_head(after_version=-1)
    await anext(watch)
    old = certificates.identity("sampler", SITE).serial
    server_before = await asyncio.to_thread(_server_serial, secure)

    certificates.renew("sampler", SITE)
    certificates.renew("coordinator", "main")
    assert len(await secure.run.lease(1)) == 1
    await secure.run.publish()

    assert (await anext(watch)).version == 1
    server_after = await asyncio.to_thread(_server_serial, secure)
    assert server_after == certificates.identity("coordinator", "main").serial != server_before
    # New calls use the new certificate: the old one may go, and only what it opened is dialled again.
    certificates.authority.revoke(f"{old:x}")
    assert len(await secure.run.lease(1)) == 1
    await secure.run.publish()
    with pytest.raises(Unreachable):
        await anext(watch)
    again = secure.sampler.watch_head(after_version=-1)
    assert (await anext(again)).version == 2
    await again.aclose()


async def test_half_a_rotation_changes_nothing(secure, caplog):
    node = secure.certificates.node("sampler", SITE)
    key, cert = (node / "node.key").read_bytes(), (node / "node.crt").read_bytes()
    for damage in (b"", b"not PEM", secure.certificates.pair("sampler", "us-1").key):
        (node / "node.key").write_bytes(damage)
        assert len(await secure.run.lease(1)) == 1
    (node / "node.key").write_bytes(key)
    (node / "node.crt").unlink()
    assert len(await secure.run.lease(1)) == 1
    (node / "node.crt").write_bytes(cert)

    assert "the old certificates stay in use" in caplog.text
    assert len(await secure.run.lease(1)) == 1


async def test_authorities_change_without_an_end(secure):
    """Old and new authority side by side, then nodes, then the old one away."""
    certificates = secure.certificates
    other = Certificates(certificates.directory / "next")
    server, node = certificates.node("coordinator", "main"), certificates.node("sampler", SITE)
    both = certificates.ca + other.ca
    for directory in (server, node):
        (directory / "ca.crt").write_bytes(both)
    assert len(await secure.run.lease(1)) == 1
    for directory, role, site in ((node, "sampler", SITE), (server, "coordinator", "main")):
        pair = other.pair(role, site)
        (directory / "node.key").write_bytes(pair.key)
        (directory / "node.crt").write_bytes(pair.cert)
        assert len(await secure.run.lease(1)) == 1
    for directory in (server, node):
        (directory / "ca.crt").write_bytes(other.ca)

    assert len(await secure.run.lease(1)) == 1
    error = await secure.attempt(certificates.pair("operator", "eu-1"), "GetStatus", run_pb2.GetStatusRequest())
    assert type(error) is Unreachable


async def test_a_sampler_cannot_pose_as_the_coordinator(secure):
    pair = secure.certificates.pair("sampler", "eu-1")
    posing = secure.certificates.odd(uris=[GOOD], dns=["localhost"])
    for fake in (pair, posing):
        server = grpc.aio.server()
        run_pb2_grpc.add_RunServiceServicer_to_server(run_pb2_grpc.RunServiceServicer(), server)
        credentials = grpc.ssl_server_credentials([(fake.key, fake.cert)], secure.certificates.ca, True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        tls = secure.certificates.tls("operator")
        async with CoordinatorClient(f"localhost:{port}", tls=tls, policy=QUICK) as client:
            with pytest.raises(Unreachable):
                await client.get_status()
        await server.stop(0)


async def test_client_and_server_refuse_files_that_cannot_work(tmp_path):
    certificates = Certificates(tmp_path / "certs")
    good = paths(certificates.node("sampler", "eu-1"))

    def write(name, data):
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    expired, double = certificates.odd(uris=[GOOD], end=-DAY / 2), certificates.odd(uris=[GOOD, GOOD])
    foreign = make_authority(run="run", now=now(), lifetime=datetime.timedelta(days=1))
    for changes, message in (
        ({"ca": str(tmp_path / "nothing")}, "tls.ca: cannot read"),
        ({"ca": write("a", b"x")}, "tls.ca: holds no PEM"),
        ({"ca": write("b", foreign.cert)}, "tls.cert: was issued by no authority"),
        ({"key": write("c", foreign.key)}, "tls.key: is not the key of"),
        ({"key": write("d", b"x")}, "tls.key: is not an unencrypted"),
        ({"cert": write("e", expired.cert), "key": write("f", expired.key)}, "tls.cert: .* has expired"),
        ({"cert": write("g", double.cert), "key": write("h", double.key)}, "tls.cert: .* 2 URIs"),
    ):
        with pytest.raises(ConfigError, match=message):
            CoordinatorClient("127.0.0.1:1", tls=TlsConfig(**{**good, **changes}))
    tls = certificates.server_tls()
    with pytest.raises(ConfigError, match="this is the coordinator of run other"):
        Server(CoordinatorConfig(max_message_bytes=2 << 20, max_concurrent_rpcs=8, run_id="other", tls=tls))
    with pytest.raises(ConfigError, match="role/sampler"):
        Server(
            CoordinatorConfig(
                max_message_bytes=2 << 20, max_concurrent_rpcs=8, run_id="run", tls=tls.model_copy(update=good)
            )
        )
    gone = tls.model_copy(update={"revoked": str(tmp_path / "nothing")})
    with pytest.raises(ConfigError, match="tls.revoked"):
        Server(CoordinatorConfig(max_message_bytes=2 << 20, max_concurrent_rpcs=8, run_id="run", tls=gone))


async def test_tls_1_2_is_refused_typed_and_1_3_is_not(secure):
    before = refusals().get("tls_version", 0.0)
    old = await asyncio.to_thread(_heartbeat_by_hand, secure, ssl.TLSVersion.TLSv1_2)
    new = await asyncio.to_thread(_heartbeat_by_hand, secure, ssl.TLSVersion.TLSv1_3)

    assert b"grpc-status\x0216" in old  # UNAUTHENTICATED
    assert b"TLS 1.3 is needed" in old
    assert b"grpc-status\x010" in new  # OK
    assert refusals()["tls_version"] == before + 1


async def test_plaintext_on_loopback_goes_through_no_proxy(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    server = Server(CoordinatorConfig(max_message_bytes=2 << 20, max_concurrent_rpcs=8, run_id="run", tls=PLAINTEXT))
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path), SystemClock())
    run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(core.run), server.grpc)
    port = await server.start("127.0.0.1:0")

    async with CoordinatorClient(f"127.0.0.1:{port}", tls=PLAINTEXT, policy=QUICK) as client:
        assert (await client.get_status()).head_version == -1
    await server.stop(0)
    await core.close()


def _context(secure, version=None):
    node = secure.certificates.node("sampler", SITE)
    context = ssl.create_default_context(cafile=str(node / "ca.crt"))
    context.load_cert_chain(node / "node.crt", node / "node.key")
    context.set_alpn_protocols(["h2"])
    if version is not None:
        context.minimum_version = context.maximum_version = version
    return context


def _server_serial(secure):
    with socket.create_connection(("127.0.0.1", secure.port), 20) as plain:
        with _context(secure).wrap_socket(plain, server_hostname="localhost") as link:
            return x509.load_der_x509_certificate(link.getpeercert(binary_form=True)).serial_number


def _heartbeat_by_hand(secure, version):
    """One unary call in HTTP/2 frames (RFC 9113) with literal headers (RFC 7541, 6.2.2): gRPC cannot be held to 1.2."""
    headers = {
        ":method": "POST", ":scheme": "https", ":path": "/heterorl.v1.RunService/Heartbeat", ":authority": "localhost",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )
    message = HEARTBEAT.SerializeToString()

    def frame(kind, flags, stream, payload):
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    request = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, block)
    request += frame(0, 1, 1, b"\x00" + struct.pack(">I", len(message)) + message)
    received = b""
    with socket.create_connection(("127.0.0.1", secure.port), 20) as plain:
        with _context(secure, version).wrap_socket(plain, server_hostname="localhost") as link:
            link.sendall(request)
            while b"grpc-status" not in received:
                data = link.recv(65536)
                assert data, received
                received += data
    return received


@pytest.mark.parametrize("command", [["status"], pytest.param(["top", "--once"], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fault", "words"),
    [("name", "a name in the coordinator's certificate"), ("authority", "another authority signed its certificate")],
)
async def test_operator_is_told_in_words_why_there_is_no_link(secure, tmp_path, command, fault, words):
    certificates = secure.certificates if fault == "name" else Certificates(tmp_path / "other")
    # The same machine by a name that the coordinator's certificate does not have.
    host = "[::ffff:127.0.0.1]" if fault == "name" else "127.0.0.1"
    node = certificates.node("operator", "me")
    program = [sys.executable, "-m", "heterorl", *command, f"{host}:{secure.port}", "--credentials", str(node)]

    process = await asyncio.create_subprocess_exec(
        *program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env={**os.environ, "COLUMNS": "300"}
    )
    said = (await process.communicate())[0].decode()

    assert process.returncode != 0
    assert words in said
    # The lines that gRPC's C++ parts would print themselves.
    assert "ssl_transport" not in said
    assert "InitializeLog" not in said
