"""A compromised coordinator holds genuine signed manifests and writes plans of its own, over real sockets."""

import asyncio
import contextlib

import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from heterorl.common.errors import CorruptData, DiskFull, LimitExceeded, MalformedPayload
from heterorl.common.identity.signing import Signer, Trust
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.clock import SystemClock
from heterorl.common.pull.fetcher import MAX_COPIES, Fetcher
from heterorl.common.pull.puller import Puller
from heterorl.common.rpc.client import CoordinatorClient
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadKind, PayloadRef
from heterorl.common.weights.payload import max_file_bytes
from heterorl.common.wire.policy_messages import frame_checksum
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.core import Coordinator
from heterorl.v1 import policy_pb2, policy_pb2_grpc
from tests.support.clock import ManualClock
from tests.support.run import LAYOUT, Run

LARGEST = max_file_bytes(LAYOUT.chunks)
TOKEN = b"\nssh-ed25519 AAAA attacker\n"
GOOD = "a" * 64


class Evil(policy_pb2_grpc.PolicyServiceServicer):
    """Answers with a genuine manifest and its own payloads; sends TOKEN for whatever is asked."""

    def __init__(self, signed, payloads):
        self.signed, self.payloads = signed, payloads
        self.reads = 0

    async def PlanPull(self, request, context):
        return policy_pb2.PlanPullResponse(
            kind=policy_pb2.PLAN_KIND_SNAPSHOT, target_version=0, manifests=[self.signed.data] * len(self.payloads),
            signature=self.signed.signature, payloads=self.payloads,
        )  # fmt: skip

    async def ReadPayload(self, request, context):
        self.reads += 1
        yield policy_pb2.ReadPayloadResponse(frame=TOKEN, checksum=frame_checksum(TOKEN))


def payload(digest, num_bytes, *, to_version=0):
    kind = policy_pb2.PAYLOAD_KIND_SNAPSHOT
    return policy_pb2.PayloadRef(kind=kind, from_version=-1, to_version=to_version, digest=digest, num_bytes=num_bytes)


@pytest.fixture
async def signed(tmp_path):
    signer = Signer(Ed25519PrivateKey.generate())
    core = await Coordinator.open(CoordinatorConfig(data_dir=tmp_path / "data"), ManualClock())
    run = Run(core, tmp_path)
    run.signer = signer
    await run.begin()
    await run.publish()
    yield await core.get_signed_manifest(version=0), Trust([signer.public_key])
    await core.close()


@contextlib.asynccontextmanager
async def served(servicer):
    server = grpc.aio.server()
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with CoordinatorClient(f"127.0.0.1:{port}", tls=TlsConfig(insecure=True)) as api:
            yield api
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    "name",
    [
        "../../home/authorized_keys", "/no-such-directory/x", "authorized_keys", "", ".", "..", GOOD[:-1] + "/", GOOD.upper(),
        GOOD + ".5", "\0" * 64, GOOD[:-1] + "\n", "*" * 64, "\u0661" * 64,
    ],
)  # fmt: skip
async def test_name_that_is_no_digest_touches_no_file_and_asks_for_nothing(tmp_path, signed, name):
    genuine, trust = signed
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "authorized_keys").write_text("owner")
    before = sorted(tmp_path.rglob("*"))
    evil = Evil(genuine, [payload(name, 1 << 20)])

    async def admit(plan):
        trust.check(plan.manifests[-1], plan.signature, version=plan.target_version)

    async with served(evil) as api:
        puller = Puller(api=api, spool=tmp_path / "state" / "incoming", layout=LAYOUT, clock=SystemClock())
        with pytest.raises(CorruptData, match=r"digest"):
            await puller.pull(held=None, want_version=-1, admit=admit)

    assert evil.reads == 0
    assert (tmp_path / "home" / "authorized_keys").read_text() == "owner"
    made = {tmp_path / "state", tmp_path / "state" / "incoming"}
    assert set(tmp_path.rglob("*")) - set(before) == made


@pytest.mark.parametrize("num_bytes", [LARGEST + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
async def test_size_beyond_what_the_layout_can_have_is_refused_before_a_byte(tmp_path, signed, num_bytes):
    genuine, _ = signed
    evil = Evil(genuine, [payload(GOOD, num_bytes)])

    async with served(evil) as api:
        puller = Puller(api=api, spool=tmp_path / "incoming", layout=LAYOUT, clock=SystemClock())
        with pytest.raises(CorruptData, match=r"at most|beyond any file"):
            await puller.pull(held=None, want_version=-1)

    assert evil.reads == 0
    assert list((tmp_path / "incoming").iterdir()) == []


@pytest.mark.parametrize(
    "payloads",
    [
        [payload(f"{number:064x}", LARGEST, to_version=number - MAX_COPIES) for number in range(MAX_COPIES + 1)],
        [payload(GOOD, 1), payload("b" * 64, 1)],
        [payload(GOOD, 1, to_version=5)],
        [payload(GOOD, 1, to_version=1), payload("b" * 64, 1)],
    ],
    ids=["more than the disk is lent", "two to one version", "elsewhere", "back"],
)
async def test_plan_that_leads_nowhere_or_fills_the_disk_is_refused_before_a_byte(tmp_path, signed, payloads):
    genuine, _ = signed
    evil = Evil(genuine, payloads)

    async with served(evil) as api:
        puller = Puller(api=api, spool=tmp_path / "incoming", layout=LAYOUT, clock=SystemClock())
        with pytest.raises(CorruptData, match=r"copies|in order"):
            await puller.pull(held=None, want_version=-1)

    assert evil.reads == 0


def reference(digest=GOOD, num_bytes=100):
    return PayloadRef(
        kind=PayloadKind.SNAPSHOT, from_version=-1, to_version=0, digest=Digest(digest), num_bytes=num_bytes
    )


async def test_fetcher_itself_takes_no_other_name_however_it_came(tmp_path):
    fetcher = Fetcher(api=None, spool=tmp_path / "spool", clock=ManualClock(), max_bytes=LARGEST)
    with pytest.raises(MalformedPayload, match="is not a digest"):
        await fetcher.fetch(reference("../x"))
    with pytest.raises(LimitExceeded, match="at most"):
        await fetcher.fetch(reference(num_bytes=LARGEST + 1))


async def test_disk_without_room_is_told_before_a_byte_is_asked_for(tmp_path):
    fetcher = Fetcher(api=None, spool=tmp_path / "spool", clock=ManualClock(), max_bytes=1 << 62)
    with pytest.raises(DiskFull, match=r"incoming|spool: \d+ bytes are needed, \d+ are free"):
        await fetcher.fetch(reference(num_bytes=1 << 61))
    assert list((tmp_path / "spool").iterdir()) == []


async def test_frames_without_bytes_are_no_sign_of_life(tmp_path):
    class Idle:
        async def read_payload(self, *, digest, offset, stop=None):
            while True:
                await asyncio.sleep(0)
                yield b""

    fetcher = Fetcher(api=Idle(), spool=tmp_path / "spool", clock=ManualClock(), max_bytes=LARGEST)
    with pytest.raises(MalformedPayload, match="without bytes"):
        await fetcher.fetch(reference())


async def test_strange_names_in_the_spool_are_not_taken_for_pieces(tmp_path):
    (tmp_path / f"{GOOD}.x").write_bytes(b"1")
    (tmp_path / f"{GOOD}.-1").write_bytes(b"1")
    fetcher = Fetcher(api=None, spool=tmp_path, clock=ManualClock(), max_bytes=LARGEST)

    assert [(piece.start, piece.length) for piece in fetcher._pieces(reference())] == [(0, 0)]
