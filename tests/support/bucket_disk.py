"""moto's server with a disk: what changes an object is in a file before it is answered, and is done again at the start.

A request that was under way at a SIGKILL may have taken effect or not, as with any server; one that was answered has.
Uploads in parts are not followed: their names are given out anew.

    python -m tests.support.bucket_disk PORT FILE
"""

from __future__ import annotations

import base64
import io
import json
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple
from werkzeug.test import Client
from werkzeug.wrappers import Response

_READS = ("GET", "HEAD")


class OnDisk:
    """The application of moto's server, with what it was asked to change in a file."""

    def __init__(self, app: Any, file: Path) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._replay(file)
        self._file = file.open("ab")

    def _replay(self, file: Path) -> None:
        data = file.read_bytes() if file.exists() else b""
        # Half a line was never answered.
        whole = data[: data.rfind(b"\n") + 1]
        client = Client(self._app, Response)
        for line in whole.splitlines():
            request = json.loads(line)
            body = base64.b64decode(request.pop("body"))
            client.open(data=body, base_url=f"http://{request['headers']['Host']}", **request).close()
        file.write_bytes(whole)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in _READS:
            found: Iterable[bytes] = self._app(environ, start_response)
            return found
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        headers = {
            name[5:].replace("_", "-").title(): value for name, value in environ.items() if name.startswith("HTTP_")
        }
        if environ.get("CONTENT_TYPE"):
            headers["Content-Type"] = environ["CONTENT_TYPE"]
        target = environ.get("RAW_URI") or environ["PATH_INFO"]
        path, _, query = target.partition("?")
        row = {
            "method": environ["REQUEST_METHOD"], "path": path, "query_string": query or environ["QUERY_STRING"],
            "headers": headers, "body": base64.b64encode(body).decode(),
        }  # fmt: skip
        # One after another, so that the file has the order in which they took effect.
        with self._lock:
            answer = Response.from_app(self._app, environ, buffered=True)
            if answer.status_code < 300:
                self._file.write(json.dumps(row).encode() + b"\n")
                self._file.flush()
        return answer(environ, start_response)


if __name__ == "__main__":
    application = OnDisk(DomainDispatcherApplication(create_backend_app), Path(sys.argv[2]))
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True, request_handler=MotoRequestHandler)
