"""A payload and a source of it whose streams can be cut or stand still."""

import asyncio

import blake3
import numpy as np

from heterorl.common.pull.fetcher import SPLIT_BYTES
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadKind, PayloadRef

DATA = np.random.default_rng(0).bytes(9 * SPLIT_BYTES + 12345)
FRAME = 1 << 20
PAYLOAD = PayloadRef(
    kind=PayloadKind.SNAPSHOT,
    digest=Digest(blake3.blake3(DATA).hexdigest()),
    num_bytes=len(DATA),
    from_version=-1,
    to_version=0,
)


class Source:
    """Sends ranges of DATA; streams can be cut after a number of bytes, or stand still."""

    def __init__(self):
        self.asked = []
        self.sent = 0
        self.cut_after = {}
        self.hold = None
        self.open_streams = 0
        self.most_streams = 0

    async def read_payload(self, *, digest, offset, stop=None):
        assert digest == PAYLOAD.digest
        number = len(self.asked)
        self.asked.append((offset, stop))
        self.open_streams += 1
        self.most_streams = max(self.most_streams, self.open_streams)
        left = self.cut_after.get(number, len(DATA))
        try:
            end = len(DATA) if stop is None else stop
            while offset < end and left > 0:
                await asyncio.sleep(0)
                if self.hold is not None and number == self.hold:
                    await asyncio.Event().wait()
                frame = DATA[offset : min(offset + FRAME, end, offset + left)]
                offset, left, self.sent = offset + len(frame), left - len(frame), self.sent + len(frame)
                yield frame
        finally:
            self.open_streams -= 1
