"""The page, from its source to its port.

    coordinator or export -> source (its thread) -> index (on this machine's disk) -> pages <- server's threads

The source waits for its peer, the index for nobody but its writer, a request for a search of at most a moment. What was
read is deleted with the directory when the page ends.
"""

from __future__ import annotations

import contextlib
import html
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from heterorl.view.pages import Pages
from heterorl.view.sample_index import SampleIndex, Source
from heterorl.view.view_server import ViewServer

LIMIT_BYTES = 3 << 29
"""Of texts and numbers; with their index they take about 2.7 times as much of the disk. The oldest go first."""
KEY_BYTES = 24


@contextlib.contextmanager
def door(url: str) -> Iterator[Path]:
    """A file that leads a browser to a URL, readable by this user alone and gone at the end.

    A URL with a key among a browser's arguments would stand in the list of processes, which every user may read.
    """
    with tempfile.TemporaryDirectory(prefix="heterorl-view-") as directory:
        path = Path(directory) / "open.html"
        place = html.escape(url, quote=True)
        words = f'<!doctype html><meta http-equiv="refresh" content="0;url={place}"><a href="{place}">Samples</a>\n'
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:  # noqa: PTH123 - of a descriptor
            file.write(words)
        yield path


@contextlib.contextmanager
def served(make_source: Callable[[SampleIndex], Source], *, port: int = 0) -> Iterator[ViewServer]:
    """Serve what a source has until the context ends.

    Raises:
        PortInUse: another process listens on the port.
        HeterorlError: the source cannot be opened.
    """
    with tempfile.TemporaryDirectory(prefix="heterorl-view-") as directory, contextlib.ExitStack() as stack:
        index = SampleIndex(Path(directory), limit_bytes=LIMIT_BYTES)
        stack.callback(index.close)
        source = make_source(index)
        server = ViewServer(Pages(index, source).respond, port=port, key=secrets.token_urlsafe(KEY_BYTES))
        stack.callback(source.close)
        stack.callback(server.close)
        source.start()
        server.start()
        yield server
