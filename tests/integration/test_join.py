"""Nodes that join with a token, over real sockets: what they get, what is refused, and what is never sent."""

import asyncio
import contextlib
import dataclasses
import errno
import re
import socket
import ssl
import struct
import time
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from heterorl.certs import enrolment
from heterorl.certs import enrolment_server as server_module
from heterorl.certs.authority import issue_enrolment_server
from heterorl.certs.enrolment import (
    MAX_FRAME,
    BrokenFrame,
    Enrolment,
    JoinRefused,
    Refused,
    frame,
    parse_token,
    read_frame,
    read_request,
)
from heterorl.certs.enrolment_client import WrongAuthority, ask, join, signing_request
from heterorl.certs.enrolment_server import EnrolmentServer
from heterorl.cli.certs import first_lines
from heterorl.cli.main import app
from heterorl.common.errors import ConfigError, OperatorError
from heterorl.common.identity.credentials import read_material
from heterorl.common.identity.spiffe import Role, read_identity
from heterorl.common.identity.tls import TlsConfig, files_in
from heterorl.learner.learner_config import LearnerConfig
from heterorl.sampler.sampler_config import SamplerConfig
from tests.support.certificates import Certificates, now, paths
from tests.support.secure_run import SecureRun


class Office:
    """An authority with its enrolment server; `ahead_s` moves its clock."""

    def __init__(self, directory: Path) -> None:
        self.certificates = Certificates(directory)
        self.directory = directory
        self.enrolment = Enrolment(directory)
        self.ahead_s = 0.0

    def time(self) -> float:
        return time.time() + self.ahead_s

    def token(self, *, site="eu-1", role=Role.SAMPLER, seconds=60.0):
        return self.enrolment.create(role=role, site=site, address="", days=3, expires=self.time() + seconds)

    def book(self):
        return sorted(path.name for path in (self.directory / "issued").iterdir())

    @contextlib.asynccontextmanager
    async def open(self):
        server = EnrolmentServer(self.directory, wall_time=self.time)
        async with server.listening("127.0.0.1:0") as port:
            self.address = f"127.0.0.1:{port}"
            yield self


@pytest.fixture
async def office(tmp_path):
    async with Office(tmp_path / "certs").open() as office:
        yield office


def new_key():
    return ec.generate_private_key(ec.SECP256R1())


async def refusal(office, token, *, key=None, address=None):
    with pytest.raises(JoinRefused) as refused:
        await ask(token, address=address or office.address, key=key or new_key(), now=time.time())
    return refused.value.reason


async def test_node_joins_and_its_key_stays_with_it(office, tmp_path):
    token = office.token()
    seen = []
    relay = await _recording_relay(office.address, seen)
    async with relay:
        await join(token, address=f"127.0.0.1:{relay.sockets[0].getsockname()[1]}", out=tmp_path / "node")

    identity = read_identity((tmp_path / "node" / "node.crt").read_bytes())
    assert identity.uri == "spiffe://run/site/eu-1/role/sampler"
    assert 2.9 < (identity.not_after - time.time()) / 86400 < 3.1
    material = read_material(TlsConfig(**paths(tmp_path / "node")), number=0, now=time.time())
    assert material.ca == office.certificates.ca
    assert (tmp_path / "node" / "node.key").stat().st_mode & 0o777 == 0o600
    # Neither key nor secret is at the authority or on the wire.
    secret_number = load_pem_private_key(material.key, password=None).private_numbers().private_value
    haystack = b"".join(seen) + b"".join(path.read_bytes() for path in office.directory.rglob("*") if path.is_file())
    assert token.secret not in haystack
    assert token.secret.hex().encode() not in haystack
    assert secret_number.to_bytes(32, "big") not in haystack
    assert len(office.book()) == 1


async def _recording_relay(address, seen):
    host, port = address.split(":")

    async def relay(reader, writer):
        far_reader, far_writer = await asyncio.open_connection(host, int(port))

        async def pump(source, sink):
            while data := await source.read(65536):
                seen.append(data)
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    return await asyncio.start_server(relay, "127.0.0.1", 0)


async def test_issued_certificate_is_accepted_by_a_coordinator_and_can_be_revoked(tmp_path):
    async with SecureRun(tmp_path) as secure:
        office = Office(tmp_path / "certs")
        async with office.open():
            token = office.token(site="me", role=Role.OPERATOR)
            await join(token, address=office.address, out=tmp_path / "me")
        arguments = ["status", secure.address, "--json", "--credentials", str(tmp_path / "me")]
        first = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        office.certificates.authority.revoke(str(tmp_path / "me"))
        second = await asyncio.to_thread(CliRunner().invoke, app, arguments)

    assert first.exit_code == 0, first.exception
    assert "revoked" in str(second.exception)


async def test_token_counts_once(office):
    token = office.token()
    await ask(token, address=office.address, key=new_key(), now=time.time())

    assert await refusal(office, token) is Refused.USED
    assert len(office.book()) == 1


async def test_revoking_a_site_without_a_certificate_deletes_its_tokens_only(office):
    token, other = office.token(), office.token(site="eu-2")

    revoked = office.certificates.authority.revoke_node(role=Role.SAMPLER, site="eu-1")

    assert (revoked, await refusal(office, token)) == ([], Refused.TOKEN)
    await ask(other, address=office.address, key=new_key(), now=time.time())


async def test_token_counts_until_it_expires(office):
    token = office.token(seconds=60.0)
    office.ahead_s = 61.0

    assert await refusal(office, token) is Refused.EXPIRED
    assert office.book() == []


async def test_secret_that_was_changed_and_number_that_is_not_there(office):
    token = office.token()

    assert await refusal(office, dataclasses.replace(token, secret=bytes(32))) is Refused.TOKEN
    assert await refusal(office, dataclasses.replace(token, id=bytes(8))) is Refused.TOKEN
    # What was tried with it does not use a token up.
    await ask(token, address=office.address, key=new_key(), now=time.time())


@pytest.mark.parametrize("uri", ["spiffe://run/site/eu-2/role/sampler", "spiffe://run/site/eu-1/role/learner"])
async def test_request_for_another_site_or_role_is_refused_and_uses_nothing_up(office, uri):
    token = office.token()

    assert await refusal(office, dataclasses.replace(token, uri=uri)) is Refused.IDENTITY
    assert office.book() == []
    await ask(token, address=office.address, key=new_key(), now=time.time())


async def test_of_many_at_once_exactly_one_gets_a_certificate(office):
    token = office.token()
    async with office.open():
        outcomes = await asyncio.gather(
            *(ask(token, address=office.address, key=new_key(), now=time.time()) for _ in range(8)),
            return_exceptions=True,
        )

    issued = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
    assert len(issued) == 1
    assert {outcome.reason for outcome in outcomes if isinstance(outcome, JoinRefused)} == {Refused.USED}
    assert office.book() == [f"{issued[0][1].serial_number:x}.crt"]


async def _silent(office, source, count):
    """Connections that begin no handshake."""
    host, port = office.address.split(":")
    return [await asyncio.open_connection(host, port, local_addr=(source, 0)) for _ in range(count)]


async def _ended(connections):
    """Wait until the server has closed them."""
    for reader, writer in connections:
        assert await reader.read() == b""
        writer.close()


async def test_silent_connections_keep_nobody_from_joining(office, monkeypatch):
    monkeypatch.setattr(server_module, "SPEAK_S", 3600.0)
    monkeypatch.setattr(server_module, "ANSWER_S", 3600.0)
    first = await _silent(office, "127.0.1.1", 8)
    # Beyond its share an address is closed at once.
    await _ended(await _silent(office, "127.0.1.1", 2))
    others = [each for number in range(2, 9) for each in await _silent(office, f"127.0.1.{number}", 8)]

    await ask(office.token(), address=office.address, key=new_key(), now=time.time())
    await _ended(first[:1])
    for _, writer in first[1:] + others:
        writer.close()


async def test_connection_that_says_nothing_ends(office, monkeypatch):
    monkeypatch.setattr(server_module, "SPEAK_S", 0.05)
    monkeypatch.setattr(server_module, "ANSWER_S", 3600.0)

    await _ended(await _silent(office, "127.0.1.1", 1))


async def test_connection_that_is_reset_leaves_no_task(office):
    before = asyncio.all_tasks()
    ((_, writer),) = await _silent(office, "127.0.1.1", 1)
    while not (answering := asyncio.all_tasks() - before):  # noqa: ASYNC110 - a set
        await asyncio.sleep(0)
    # A reset instead of an end.
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

    await asyncio.wait_for(answering.pop(), 10)


async def test_lost_answer_is_given_again_to_the_same_key_only(office, tmp_path):
    token = office.token()
    reader, writer = await asyncio.open_connection(*office.address.split(":"), ssl=_blind())
    await read_frame(reader)
    (tmp_path / "node").mkdir()
    key = new_key()
    _write_key(tmp_path / "node" / "node.key", key)
    writer.write(frame(token.id + token.secret) + frame(signing_request(key, uri=token.uri)))
    await writer.drain()
    # The reply is on its way, and the node dies.
    first = await read_frame(reader)
    writer.close()

    assert await refusal(office, token) is Refused.USED
    await join(token, address=office.address, out=tmp_path / "node")
    again = x509.load_pem_x509_certificate((tmp_path / "node" / "node.crt").read_bytes())
    assert again.public_bytes(Encoding.DER) == first[1:]
    assert len(office.book()) == 1


async def test_a_disk_that_is_full_is_said_at_both_ends_and_the_token_counts(office, tmp_path, monkeypatch, caplog):
    token = office.token()

    def full(*_arguments, **_keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(enrolment, "write_file", full)
        with pytest.raises(JoinRefused, match="cannot issue certificates now") as refused:
            await join(token, address=office.address, out=tmp_path / "node")

    assert refused.value.reason is Refused.FAULT
    assert "No space left on device" in caplog.text
    await join(token, address=office.address, out=tmp_path / "node")


@pytest.mark.parametrize("point", ["sign_node", "write_file"])
async def test_crash_between_use_and_certificate_leaves_the_token_to_its_key(office, tmp_path, monkeypatch, point):
    token = office.token()
    real = getattr(enrolment, point)

    def crash(*arguments, **keywords):
        # The row of the token is written; the certificate, or its place in the book, is not.
        if point == "sign_node" or "issued" in str(arguments[0]):
            raise ConfigError("--dir", "crash")
        return real(*arguments, **keywords)

    monkeypatch.setattr(enrolment, point, crash)
    with pytest.raises(JoinRefused) as refused:
        await join(token, address=office.address, out=tmp_path / "node")
    assert refused.value.reason is Refused.FAULT
    monkeypatch.setattr(enrolment, point, real)

    assert office.book() == []
    assert await refusal(office, token) is Refused.USED
    await join(token, address=office.address, out=tmp_path / "node")
    assert len(office.book()) == 1


async def test_certificate_that_was_revoked_is_not_given_again(office, tmp_path):
    token = office.token()
    await join(token, address=office.address, out=tmp_path / "node")
    office.certificates.authority.revoke(str(tmp_path / "node" / "node.crt"))
    (tmp_path / "node" / "node.crt").unlink()

    with pytest.raises(JoinRefused) as refused:
        await join(token, address=office.address, out=tmp_path / "node")
    assert refused.value.reason is Refused.REVOKED


@contextlib.asynccontextmanager
async def impostor(pair, greeting, heard):
    """A server with any certificate and any greeting, and all that is said to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    async def answer(reader, writer):
        writer.write(frame(greeting))
        heard.append(await reader.read(-1))
        writer.close()

    path = Path(heard[0]) / "impostor.pem"
    heard.clear()
    path.write_bytes(pair.key + pair.cert)
    context.load_cert_chain(path)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("who", ["another authority", "one in between", "a node of the run"])
async def test_nothing_is_said_to_another_than_the_tokens_authority(tmp_path, who):
    office, other = Office(tmp_path / "certs"), Office(tmp_path / "other")
    token = office.token()
    der = [
        x509.load_pem_x509_certificate(place.certificates.ca).public_bytes(Encoding.DER) for place in (office, other)
    ]
    # In between: the right authority is public and easily shown; its key is not there.
    pair, greeting = {
        "another authority": (issue_enrolment_server(other.certificates.authority.pair(), now=now()), der[1]),
        "one in between": (issue_enrolment_server(other.certificates.authority.pair(), now=now()), der[0]),
        "a node of the run": (office.certificates.pair("sampler", "evil"), der[0]),
    }[who]
    heard = [tmp_path]
    async with impostor(pair, greeting, heard) as address:
        with pytest.raises(WrongAuthority):
            await join(token, address=address, out=tmp_path / "node")
        while not heard:  # noqa: ASYNC110 - a list
            await asyncio.sleep(0.01)

    assert heard == [b""]
    assert not (tmp_path / "node" / "node.crt").exists()


async def test_pin_that_was_changed_is_refused_before_a_word(office, tmp_path):
    token = dataclasses.replace(office.token(), pin=bytes(32))

    with pytest.raises(WrongAuthority):
        await join(parse_token(token.text()), address=office.address, out=tmp_path / "node")
    assert office.book() == []


@pytest.mark.parametrize("years", [-30, 30])
async def test_wrong_clock_of_a_node_is_named_and_costs_no_token(office, years):
    token = office.token()

    with pytest.raises(WrongAuthority, match="not valid now.*set this machine's clock"):
        await ask(token, address=office.address, key=new_key(), now=time.time() + years * 365 * 86400)
    await ask(token, address=office.address, key=new_key(), now=time.time())


async def test_server_outlives_what_is_no_node(office):
    host, port = office.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=_blind())
    await read_frame(reader)
    writer.write((MAX_FRAME + 1).to_bytes(4, "big") + b"x")
    assert await reader.read() == b""
    writer.close()
    reader, writer = await asyncio.open_connection(host, int(port), ssl=_blind())
    await read_frame(reader)
    writer.write(frame(b"short") + frame(b"junk"))
    assert (await read_frame(reader))[0] == Refused.TOKEN
    writer.close()
    plain_reader, plain_writer = await asyncio.open_connection(host, int(port))
    plain_writer.write(b"GET / HTTP/1.0\r\n\r\n")
    with contextlib.suppress(OSError):
        await plain_reader.read()
    plain_writer.close()

    await ask(office.token(), address=office.address, key=new_key(), now=time.time())


def test_frames_that_end_early_are_broken():
    async def read(data):
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader)

    assert asyncio.run(read(frame(b"abc"))) == b"abc"
    for data in (b"", b"\0\0", frame(b"abc")[:-1], b"\xff\xff\xff\xff"):
        with pytest.raises(BrokenFrame):
            asyncio.run(read(data))


def _csr(key, uris):
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    )
    if uris:
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def test_signing_requests_that_are_not_read():
    good = _csr(new_key(), ["spiffe://a"])
    assert read_request(good).uri == "spiffe://a"
    # The last bytes are the signature's.
    forged = good[:-1] + bytes([good[-1] ^ 1])
    curve = ec.generate_private_key(ec.SECP384R1())
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    # Neither a version nor a name that there is: an X.400 address where the URI stood.
    version, name = (
        good.replace(b"\x02\x01\x00", b"\x02\x01\x07", 1),
        good.replace(b"\x86\x0aspiffe", b"\xa3\x0aspiffe"),
    )
    assert good not in (version, name)
    for data in (b"", b"junk", forged, version, name, _csr(new_key(), []), _csr(new_key(), ["a:b", "c:d"]), _csr(curve, ["a:b"]), _csr(other, ["a:b"])):  # fmt: skip
        with pytest.raises(JoinRefused) as refused:
            read_request(data)
        assert refused.value.reason is Refused.REQUEST


async def test_tokens_are_for_nodes_that_dial(office):
    with pytest.raises(ConfigError, match="cannot join"):
        office.token(role=Role.COORDINATOR)
    with pytest.raises(ConfigError, match="--site"):
        office.token(site="a/b")
    with pytest.raises(ConfigError, match="no authority"):
        Enrolment(office.directory / "none").create(role=Role.SAMPLER, site="a", address="", days=1, expires=1.0)


async def test_join_says_what_is_wrong_on_this_side(office, tmp_path):
    token = office.token()
    with pytest.raises(OperatorError, match="certs serve"):
        await join(token, address="127.0.0.1:1", out=tmp_path / "node")
    key = (tmp_path / "node" / "node.key").read_bytes()
    await join(token, address=office.address, out=tmp_path / "node")
    # The key of the attempt that failed is the one that was certified.
    assert (tmp_path / "node" / "node.key").read_bytes() == key
    with pytest.raises(ConfigError, match="holds a certificate"):
        await join(token, address=office.address, out=tmp_path / "node")
    with pytest.raises(ConfigError, match="already in use"):
        async with EnrolmentServer(office.directory).listening(office.address):
            pass


async def test_the_commands_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner()

    async def invoke(*arguments):
        return await asyncio.to_thread(run.invoke, app, list(arguments))

    assert (await invoke("certs", "init", "run")).exit_code == 0
    office = Office(tmp_path / "certs")
    async with office.open():
        made = await invoke("certs", "token", "create", "--site", "eu-1", "--authority", office.address)
        assert made.exit_code == 0, made.exception
        text = made.stdout.strip()
        assert re.fullmatch(r"hrl1\.[\w-]+", text)
        listed = await invoke("certs", "token", "list")
        assert "open" in listed.stdout
        joined = await invoke("join", "--token", text, "--coordinator", "127.0.0.1:1")
        assert joined.exit_code == 0, joined.exception
        assert 'site = "eu-1"' in joined.stdout
        assert "does not answer yet" in joined.stderr
        # What it prints is a configuration.
        config = SamplerConfig.model_validate(tomllib.loads(joined.stdout))
        assert (config.site, config.coordinator) == ("eu-1", "127.0.0.1:1")
        assert config.tls.key == str(tmp_path / "sampler-eu-1" / "node.key")
        assert (tmp_path / "sampler-eu-1" / "node.crt").is_file()
        # A list is for coordinators: a run has one authority.
        for key, value in (("--coordinator", "nowhere"), ("--authority", "nowhere"), ("--authority", "a:1,b:1")):
            values = {"--coordinator": "c:1,d:1", "--authority": "a:1", key: value}
            odd = await invoke(
                "join", "--token", text, "--out", "b", *[part for pair in values.items() for part in pair]
            )
            assert f"{key}: '{value}' is not host:port" in str(odd.exception)
        odd = await invoke("certs", "token", "create", "--site", "eu-1", "--authority", "a:1,b:1")
        assert "--authority: 'a:1,b:1' is not host:port" in str(odd.exception)
        again = await invoke("join", "--token", text, "--coordinator", "127.0.0.1:1", "--out", "b")
        assert "was used" in str(again.exception)
        number = re.search(r"[0-9a-f]{16}", listed.stdout).group()
        assert (await invoke("certs", "token", "delete", number)).exit_code == 0
        assert "no token" in str((await invoke("certs", "token", "delete", number)).exception)
        assert "no token" in str((await invoke("certs", "token", "delete", "../run")).exception)
        gone = await invoke("join", "--token", text, "--coordinator", "127.0.0.1:1", "--out", "b")
        assert "not of this authority" in str(gone.exception)


def test_first_lines_of_each_role():
    files = files_in(Path("/a b"))
    values = {"run": "r", "site": "s", "coordinator": "c:1", "paths": files}

    learner = LearnerConfig.model_validate(tomllib.loads("\n".join(first_lines(role="learner", **values))))
    assert (learner.run_id, learner.holder, learner.tls.ca) == ("r", "s", "/a b/ca.crt")
    assert first_lines(role="operator", **values)[1] == "heterorl top c:1 --credentials '/a b'"


def _blind():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _write_key(path, key):
    from cryptography.hazmat.primitives.serialization import NoEncryption, PrivateFormat

    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
