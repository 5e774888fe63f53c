"""Every rpc against every role and every wrong certificate, asked of a real server; made from protos and access table.

An rpc in the protos without a row in the table, or without a handler, fails here; so does a role without a cell.
"""

import asyncio

import grpc.aio
import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from google.protobuf import message_factory

from heterorl.certs.authority import Pair
from heterorl.common.identity.spiffe import Role
from heterorl.coordinator.rpc.access import RULES
from heterorl.v1 import common_pb2, rollout_pb2
from tests.support.certificates import DAY, Certificates
from tests.support.groups import push_of
from tests.support.limits import WAIT_S
from tests.support.protos import METHODS, NOT_SERVED
from tests.support.run import SITE
from tests.support.secure_run import SecureRun, refusals

GOOD = f"spiffe://run/site/{SITE}/role/sampler"
REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}


def _revoked(certificates):
    pair = certificates.pair("sampler", "thief")
    certificates.authority.revoke(str(certificates.node("sampler", "thief")))
    return pair


WRONG = {
    "of another run": (lambda c: c.odd(uris=[GOOD.replace("/run/", "/other/")]), "run"),
    "two URIs": (lambda c: c.odd(uris=[GOOD, GOOD.replace(SITE, "us-1")]), "no_identity"),
    "no URI": (lambda c: c.odd(), "no_identity"),
    "unknown role": (lambda c: c.odd(uris=[GOOD.replace("sampler", "root")]), "no_identity"),
    "revoked": (_revoked, "revoked"),
    # These do not pass the handshake, so the gate counts nothing.
    "expired": (lambda c: c.odd(uris=[GOOD], end=-DAY / 2), None),
    "not valid yet": (lambda c: c.odd(uris=[GOOD], begin=DAY / 2), None),
    "for servers only": (lambda c: c.odd(uris=[GOOD], usage=ExtendedKeyUsageOID.SERVER_AUTH), None),
    "of another authority": (lambda c: Certificates(c.directory / "other").pair("sampler", SITE), None),
    "none": (lambda c: Pair(cert=b"", key=b""), None),
    "plaintext": (lambda c: None, None),
}


@pytest.fixture
async def secure(tmp_path):
    async with SecureRun(tmp_path) as secure:
        yield secure


def test_every_rpc_of_the_protos_has_a_row_and_every_row_an_rpc():
    assert set(METHODS) - NOT_SERVED == set(RULES)


@pytest.mark.parametrize("role", Role)
async def test_every_cell_of_the_table_holds_at_the_server(secure, role):
    site = "main" if role is Role.COORDINATOR else SITE
    channel = _channel(secure, secure.certificates.pair(role, site))
    async with channel:
        for name in METHODS:
            before = refusals()
            code = await _call(channel, name, site=site)
            counted = _counted(before)

            if name in NOT_SERVED:
                assert (code, counted) == (grpc.StatusCode.PERMISSION_DENIED, {"unknown_rpc"}), name
            elif role in RULES[name].roles:
                assert code not in REFUSED | {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DEADLINE_EXCEEDED}, name
                assert counted == set(), name
            else:
                assert (code, counted) == (grpc.StatusCode.PERMISSION_DENIED, {"role"}), name
            if name in RULES and RULES[name].site and role in RULES[name].roles:
                before = refusals()
                code = await _call(channel, name, site="us-1")
                assert (code, _counted(before)) == (grpc.StatusCode.PERMISSION_DENIED, {"site"}), name


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_certificate_opens_no_rpc_at_all(secure, wrong):
    make, reason = WRONG[wrong]
    pair = make(secure.certificates)
    before = refusals()

    async def attempt(name):
        async with _channel(secure, pair) as channel:
            return await _call(channel, name, site=SITE)

    codes = dict(zip(METHODS, await asyncio.gather(*map(attempt, METHODS)), strict=True))

    if reason is None:
        assert set(codes.values()) == {grpc.StatusCode.UNAVAILABLE}, codes
        assert _counted(before) == set()
    else:
        assert set(codes.values()) <= REFUSED, codes
        assert _counted(before) - {"unknown_rpc"} == {reason}
    assert (await secure.operator.get_status()).head_version == 0


def _channel(secure, pair):
    if pair is None:
        return grpc.aio.insecure_channel(secure.address)
    credentials = grpc.ssl_channel_credentials(secure.certificates.ca, pair.key or None, pair.cert or None)
    return grpc.aio.secure_channel(secure.address, credentials)


LOST = "Internal error from Core"
"""gRPC's text of a status that its client lost: a message that fails as the server ends the call overwrites the status
(grpc/grpc#36066). Our clients repeat such a call, because it has no ErrorDetail."""


async def _call(channel, name, *, site):
    """The code that an rpc answers a request with nothing in it but what it has to state."""
    for _ in range(5):
        code, details = await _once(channel, name, site=site)
        if details != LOST:
            break
    return code


async def _once(channel, name, *, site):
    method = METHODS[name]
    request = message_factory.GetMessageClass(method.input_type)()
    if name.endswith("/PushGroups"):
        # The door takes a push for its groups.
        request = push_of(rollout_pb2.Group(id=common_pb2.GroupId(site=site)))
    elif name in RULES and RULES[name].site:
        *path, last = RULES[name].site
        part = request
        for step in path:
            part = getattr(part, step)
        setattr(part, last, site)
    if name in RULES and RULES[name].of_learner:
        setattr(request, RULES[name].of_learner, 1)
    if name.endswith("/WatchHead"):
        request.after_version = -1
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    answer = message_factory.GetMessageClass(method.output_type)
    stub = getattr(channel, kind)(
        name, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
    )
    call = stub(iter([request]) if method.client_streaming else request, timeout=WAIT_S)
    try:
        if method.server_streaming:
            # A stream that begins is an admitted one.
            async for _ in call:
                call.cancel()
                return grpc.StatusCode.OK, ""
        else:
            await call
        return await call.code(), await call.details()
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()


def _counted(before):
    return {reason for reason, count in refusals().items() if count != before.get(reason, 0.0)}
