"""A group's bytes from the outbox to the learner, over certificates and sockets: the same at every station."""

import dataclasses
import threading

import grpc.aio
import numpy as np
import pytest

from heterorl.common.types.rollout import DropReason, PushStatus
from heterorl.common.wire import sealed_groups as seals
from heterorl.common.wire.common_messages import bytes_digest
from heterorl.common.wire.sealed_groups import seal
from heterorl.coordinator.groups import intake
from heterorl.coordinator.rpc.call_admission import INLINE_BYTES
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.v1 import rollout_pb2
from tests.support.groups import group_to_bytes, group_to_pb, push_of
from tests.support.run import credits_of
from tests.support.secure_run import SecureRun

_UNKNOWN = bytes([0xF2, 0x3F, 3]) + b"new"
_PUSH = "/heterorl.v1.RolloutService/PushGroups"
_STREAM = "/heterorl.v1.RolloutService/StreamGroups"


@pytest.fixture
async def secure(tmp_path):
    async with SecureRun(tmp_path) as secure:
        yield secure


@pytest.fixture
def outbox(tmp_path):
    outbox = Outbox(tmp_path / "outbox")
    yield outbox
    outbox.close()


async def _rows(secure):
    query = "SELECT payload, digest, num_bytes FROM groups ORDER BY arrival"
    return await secure.core.database.run(lambda connection: connection.execute(query).fetchall())


async def _raw(secure, role, name, *messages):
    """The answers of a stream of bytes, as bytes."""
    pair = secure.certificates.pair(role, "eu-1")
    credentials = grpc.ssl_channel_credentials(secure.certificates.ca, pair.key, pair.cert)
    async with grpc.aio.secure_channel(secure.address, credentials) as channel:
        call = channel.stream_stream(name)()
        for message in messages:
            await call.write(message)
        await call.done_writing()
        return [answer async for answer in call]


def _outcome(answer):
    (outcome,) = rollout_pb2.PushGroupsResponse.FromString(answer).outcomes
    return outcome


async def test_bytes_are_the_same_at_every_station(secure, outbox):
    (work,) = await secure.run.lease(1)
    group = secure.run.group(work)
    outbox.put([group], release=[0.0])
    ((spooled,), _) = outbox.due(1.0, limit=1, max_bytes=1 << 20)

    (outcome,) = await secure.sampler.push_groups([spooled])
    ((payload, digest, num_bytes),) = await _rows(secure)
    wanted = rollout_pb2.StreamGroupsRequest(epoch=secure.run.epoch, credits=1).SerializeToString()
    (answer,) = await _raw(secure, "learner", _STREAM, wanted)
    queued = await anext(secure.learner.stream_groups(epoch=secure.run.epoch, held=(), credits=credits_of(1)))

    assert outcome.status is PushStatus.ACCEPTED
    assert spooled.data == payload == seal(queued.group).data == group_to_bytes(group)
    # As they are: what left is a field of the message, byte for byte.
    assert payload in answer
    assert rollout_pb2.StreamGroupsResponse.FromString(answer).group == payload
    assert (digest, num_bytes) == (bytes_digest(payload), len(payload))


async def test_push_again_in_another_form_is_the_same_group(secure, outbox):
    work = await secure.run.lease(2)
    groups = [dataclasses.replace(secure.run.group(one), trace="evil") for one in work]
    outbox.put(groups, release=[0.0, 0.0])
    spooled, _ = outbox.due(1.0, limit=2, max_bytes=1 << 20)
    earlier = push_of(group_to_pb(groups[0])).SerializeToString()
    newer = push_of(rollout_pb2.Group.FromString(seal(groups[1]).data + _UNKNOWN)).SerializeToString()

    first = await _raw(secure, "sampler", _PUSH, earlier, newer)
    again = await secure.sampler.push_groups(spooled)
    third = await _raw(secure, "sampler", _PUSH, earlier, newer)

    statuses = [_outcome(answer).status for answer in [*first, *third]]
    accepted, duplicate = rollout_pb2.PUSH_STATUS_ACCEPTED, rollout_pb2.PUSH_STATUS_DUPLICATE
    assert statuses == [accepted, accepted, duplicate, duplicate]
    assert [outcome.status for outcome in again] == [PushStatus.DUPLICATE] * 2
    # What no program follows is not kept, and what this one does not know neither.
    clean = [seal(dataclasses.replace(group, trace="")).data for group in groups]
    assert [payload for payload, _, _ in await _rows(secure)] == clean


async def test_group_with_ids_of_no_vocabulary_is_refused_and_counted(secure):
    (work,) = await secure.run.lease(1)
    message = group_to_pb(secure.run.group(work))
    message.id_bytes, message.token_ids = 4, b"\xff" * 4 * (len(message.token_ids) // message.id_bytes)
    data = message.SerializeToString(deterministic=True)

    (answer,) = await _raw(secure, "sampler", _PUSH, push_of(message).SerializeToString())

    assert _outcome(answer).reason == rollout_pb2.DROP_REASON_INVALID
    assert await _rows(secure) == [(None, bytes_digest(data), len(data))]
    assert (await secure.operator.get_status()).ledger.dropped == {DropReason.INVALID: 1}


@pytest.mark.parametrize("prompt", [2, INLINE_BYTES], ids=["short", "long"])
async def test_stores_thread_never_looks_inside_a_group(secure, monkeypatch, prompt):
    looked_by, opened_by = [], []
    real = intake.columns_of
    monkeypatch.setattr(seals, "columns_of", lambda *all: opened_by.append(threading.get_ident()) or real(*all))
    monkeypatch.setattr(intake, "columns_of", lambda *all: looked_by.append(threading.get_ident()) or real(*all))
    store = await secure.core.database.run(lambda _: threading.get_ident())
    loop = threading.get_ident()
    (work,) = await secure.run.lease(1)
    group = secure.run.group(work, prompt_token_ids=np.full(prompt, 3, np.int32))

    (outcome,) = await secure.sampler.push_groups([seal(group)])
    wanted = rollout_pb2.StreamGroupsRequest(epoch=secure.run.epoch, credits=1).SerializeToString()
    await _raw(secure, "learner", _STREAM, wanted)

    assert outcome.status is PushStatus.ACCEPTED
    # Looked at as it is, once when it came, off the event loop where it is long; opened never.
    assert opened_by == []
    assert len(looked_by) == 1
    assert store not in looked_by
    assert (loop in looked_by) == (prompt < INLINE_BYTES)


async def test_row_whose_bytes_changed_is_dropped_and_the_next_one_leased(secure):
    work = await secure.run.lease(2)
    groups = [secure.run.group(one) for one in work]
    await secure.sampler.push_groups(groups)

    def flip(connection):
        (data,) = connection.execute("SELECT payload FROM groups WHERE sequence = 1").fetchone()
        spoilt = bytearray(data)
        spoilt[-1] ^= 1
        connection.execute("UPDATE groups SET payload = ? WHERE sequence = 1", (bytes(spoilt),))

    await secure.core.database.run(flip)
    queued = await anext(secure.learner.stream_groups(epoch=secure.run.epoch, held=(), credits=credits_of(1)))

    assert queued.group.id.sequence == 2
    assert (await secure.operator.get_status()).ledger.dropped == {DropReason.INVALID: 1}
