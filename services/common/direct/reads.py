"""Reading payloads straight from a store of objects, by addresses that plans give for a while.

Guarantees: an address brings the bytes of a range and nothing more, others compare them with their name; it is asked
only where this node allows its scheme, without redirects; it is never written down, as whoever has it can read. An
address that does not serve is forgotten, and that of the next plan is asked. A payload that arrived with another digest
is distrusted: no address of it is asked any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from heterorl.common.direct.connections import Connections
from heterorl.common.errors import Unreachable
from heterorl.common.types.common import Digest
from heterorl.common.types.policy import PayloadRef

MAX_KNOWN = 4096
FRAME_BYTES = 1 << 20
_PARTIAL = 206


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a payload of so many bytes may be read; shown without its url, which is a credential."""

    url: str = field(repr=False)
    num_bytes: int


_NEW = Address(url="", num_bytes=0)


class DirectReads:
    """The addresses that a node knows. Belongs to the event loop."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        # Those of the last plans; None where an address had other bytes than the payload's name says.
        self._known: OrderedDict[Digest, Address | None] = OrderedDict()

    def note(self, payloads: Sequence[PayloadRef], urls: Sequence[str]) -> None:
        """Learn the addresses of a plan; those that this node does not ask are left out."""
        for payload, url in zip(payloads, urls, strict=False):
            if self._connections.allows(url) and self._known.get(payload.digest, _NEW) is not None:
                self._known[payload.digest] = Address(url=url, num_bytes=payload.num_bytes)
                self._known.move_to_end(payload.digest)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def find(self, digest: Digest) -> Address | None:
        """The address to read a payload from; None where there is none."""
        return self._known.get(digest)

    def forget(self, digest: Digest) -> None:
        """Ask no address of a payload until a plan brings another one."""
        if self._known.get(digest) is not None:
            del self._known[digest]

    def distrust(self, digest: Digest) -> None:
        """Ask no address of a payload any more."""
        self._known[digest] = None

    async def read(self, address: Address, *, offset: int, stop: int) -> AsyncIterator[bytes]:
        """Yield [offset, stop) of what is at an address, in frames of at most 1 MiB.

        Raises:
            Unreachable: it does not answer, refuses, or answers something else.
        """
        client = self._connections.client()
        import httpx2

        headers = {"Range": f"bytes={offset}-{stop - 1}", "Accept-Encoding": "identity"}
        try:
            async with client.stream("GET", address.url, headers=headers) as answer:
                begins = answer.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
                if answer.status_code != _PARTIAL or not begins:
                    raise Unreachable(f"the store of the payloads answers {answer.status_code}")
                num_left = stop - offset
                async for frame in answer.aiter_raw(FRAME_BYTES):
                    if len(frame) > num_left:
                        raise Unreachable("the store of the payloads sends more than was asked for")
                    num_left -= len(frame)
                    yield frame
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            # Its words may have the address.
            raise Unreachable(f"the store of the payloads does not answer ({type(error).__name__})") from None
        if num_left:
            raise Unreachable("the answer of the store of the payloads ended early")
