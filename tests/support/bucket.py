"""An S3-compatible store for tests: moto's server as a process of its own, reached over HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import IO, Any

import obstore.store

from heterorl.coordinator.coordinator_config import BucketConfig
from tests.support.limits import WAIT_S

START_S = 2 * WAIT_S
KEY, SECRET = "AKIATESTTESTTEST", "secret-of-the-tests"
BUCKET = "payloads-of-tests"


class BucketServer:
    """A server with one bucket; what it holds goes with its process, or is in the file `disk` when it starts again."""

    def __init__(self, disk: Path | None = None) -> None:
        self._disk = disk
        self.port = 0
        self.start()
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._make()
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            else:
                return

    def start(self) -> None:
        """Start the server, at the port that it had."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        if self._disk is not None:
            command = [sys.executable, "-m", "tests.support.bucket_disk", str(self.port), str(self._disk)]
        # It measures itself otherwise, and warns of what it imports.
        environment = {**os.environ, "COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=root)
        assert self._process.stderr is not None
        seen = ""
        for line in self._process.stderr:
            seen += line
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise AssertionError(seen)
        # What it says of each request must not fill the pipe.
        self._reader = threading.Thread(target=self._drain, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def _drain(self, said: IO[str]) -> None:
        with contextlib.suppress(ValueError):
            for _ in said:
                pass

    def _make(self) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=WAIT_S).close()

    def _at(self, prefix: str) -> Any:
        return obstore.store.S3Store(
            BUCKET, prefix=prefix, endpoint=self.endpoint, region="us-east-1", access_key_id=KEY,
            secret_access_key=SECRET, client_options={"allow_http": True},
        )  # fmt: skip

    def kill(self) -> None:
        """Kill the server by SIGKILL."""
        self._process.kill()
        self._process.wait(START_S)
        self._reader.join(START_S)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def stop(self) -> None:
        """End the server."""
        if self._process.returncode is None:
            self.kill()

    def names(self, prefix: str) -> list[str]:
        """Keys below a prefix, without it."""
        return sorted(entry["path"] for entry in obstore.list(self._at(prefix)).collect())

    def sizes(self, prefix: str) -> list[int]:
        """Bytes of the payloads below a prefix."""
        return [entry["size"] for entry in obstore.list(self._at(f"{prefix}/blobs")).collect()]

    def replace(self, prefix: str, name: str, data: bytes) -> None:
        """Give an object other bytes, as a hand or a failing store would."""
        obstore.put(self._at(prefix), name, data)

    def read(self, prefix: str, name: str) -> str:
        """The text of an object."""
        return bytes(obstore.get(self._at(prefix), name).bytes()).decode()

    def remove(self, prefix: str, name: str) -> None:
        """Delete an object behind the coordinator's back."""
        obstore.delete(self._at(prefix), name)

    def config(self, directory: Path, *, prefix: str, **changes: Any) -> BucketConfig:
        """What a coordinator is told of it; credentials lie in `directory`."""
        file = directory / "bucket-credentials"
        if not file.exists():
            file.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
            file.chmod(0o600)
        values: dict[str, Any] = {
            "bucket": BUCKET, "prefix": prefix, "endpoint": self.endpoint, "credentials_file": file,
            "cache_bytes": 64 << 20,
        }  # fmt: skip
        return BucketConfig(**{**values, **changes})
