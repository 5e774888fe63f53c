"""A sampler whose engine works by the clock: `python -m benchmarks.regions.sampler --config FILE`.

With a scheme it fetches, before it adopts a version, as many bytes over the same line as the scheme sends, less those
that heterorl sent. The bytes come by a gRPC stream with the sampler's certificate. Everything else is a sampler as it
is. `bench.json` in the run's directory says how.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks.regions.engine import TimedEngine
from heterorl.cli import main as cli
from heterorl.cli.check_config import load_service
from heterorl.common.errors import Unreachable
from heterorl.common.identity.credentials import channel_credentials, read_material
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.metrics import BYTES
from heterorl.common.pull.puller import PulledVersion
from heterorl.common.rpc.transport_options import channel_options
from heterorl.common.types.policy import NO_VERSION
from heterorl.sampler import engines
from heterorl.sampler.weight_sync import WeightSync

METHOD = "/bench.Rest/Read"
MESSAGE_BYTES = 16 << 20


class Rest:
    """The rest of a scheme's bytes, asked of the benchmark's server at `address`."""

    def __init__(self, address: str, tls: TlsConfig) -> None:
        self._address, self._tls = address, tls
        self._channel: grpc.aio.Channel | None = None

    async def fetch(self, *, have: int, want: int, less: int) -> None:
        """Fetch what `less` bytes lack; raises Unreachable if the stream breaks."""
        if self._channel is None:
            options = channel_options(self._address, insecure=False, max_message_bytes=MESSAGE_BYTES)
            credentials = channel_credentials(read_material(self._tls, number=0, now=time.time()))
            self._channel = grpc.aio.secure_channel(self._address, credentials, options=options)
        read = self._channel.unary_stream(METHOD)
        count = BYTES.labels("rest", "in").inc
        try:
            async for frame in read(json.dumps({"have": have, "want": want, "less": less}).encode()):
                count(len(frame))
        except grpc.aio.AioRpcError as error:
            raise Unreachable(f"the rest of version {want}: {error.details()}") from error


def main() -> None:
    """Replace the engine, add the rest to a pull, then run the sampler's command."""
    path = Path(sys.argv[sys.argv.index("--config") + 1])
    config: Any = load_service("sampler", path, ())
    bench = json.loads((path.parents[1] / "bench.json").read_text(encoding="utf-8"))
    TimedEngine.seconds_per_token = bench["seconds_per_token"][config.site]
    engines.HfEngine = TimedEngine  # type: ignore[attr-defined]
    if bench["scheme"]:
        rest, pull = Rest(bench["rest"][config.site], config.tls), WeightSync._pull

        async def whole(self: WeightSync, target: int) -> PulledVersion:
            have = NO_VERSION if self._staged is None else self._staged.version
            pulled = await pull(self, target)
            # The model that a run begins with is at the site.
            if have > NO_VERSION:
                await rest.fetch(have=have, want=pulled.version, less=self.puller.fetched_bytes)
            return pulled

        WeightSync._pull = whole  # type: ignore[method-assign]
    sys.argv.insert(1, "sampler")
    cli.main()


if __name__ == "__main__":
    main()
