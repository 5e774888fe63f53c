"""The HTML pages: a list and one sample.

The templates escape every text.

source (its thread) -> index (on disk) -> pages <- threads of the HTTP server
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import html
import json
import math
import mimetypes
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import heterorl
from heterorl.common.errors import HeterorlError
from heterorl.common.types.sample import CONSUMED, Sample, SampleKind, SampleSummary
from heterorl.view.sample_index import Found, IndexFailed, SampleIndex, Source
from heterorl.view.sample_query import FATES, MAX_TEXT, BadQuery, Query, excerpt_of, fate_words, parse_query
from heterorl.view.token_colours import probability_legend, ratio_legend, tokens_of
from heterorl.view.view_server import Answer, ViewServer

PAGE = 50
"""Samples on one page of the list."""
MAX_TOKENS = 20_000
"""Tokens coloured on one page; the rest is plain text."""
LIMIT_BYTES = 3 << 29
"""Limit of texts and numbers; with the search index they take at most about 2.9 times as much disk."""
KEY_BYTES = 24
_HERE = Path(__file__).parent
_STATIC = {path.name: path.read_bytes() for path in sorted((_HERE / "static").iterdir())}
_TONE = {
    SampleKind.CONSUMED: "good",
    SampleKind.EVALUATION: "calm",
    SampleKind.DROPPED: "warn",
    SampleKind.REJECTED: "bad",
}


class Pages:
    """Answers requests from an index that a source fills."""

    def __init__(self, index: SampleIndex, source: Source) -> None:
        self._index, self._source = index, source
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"number": number, "when": when, "fate": fate_words, "tone": _TONE.__getitem__}
        self._templates.globals |= {
            "program_version": heterorl.__version__,
            "source_name": source.name,
            "max_text": MAX_TEXT,
            "trained": CONSUMED,
        }

    def respond(self, path: str, query: str) -> Answer:
        if path.startswith("/static/"):
            return _static(path.removeprefix("/static/"))
        try:
            wanted = parse_query(query)
        except BadQuery as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, "Bad query", str(error))
        try:
            return self._at(path, wanted)
        except IndexFailed as error:
            return self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "The index failed", str(error))

    def _at(self, path: str, wanted: Query) -> Answer:
        if path == "/":
            return self._list(wanted)
        if path == "/state.json":
            return self._state()
        head, _, name = path.rpartition("/")
        if head == "/sample" and name.isascii() and name.isdecimal() and len(name) <= 18:
            return self._sample(int(name), wanted)
        return self._refuse(HTTPStatus.NOT_FOUND, "Page not found", "The list is at /.")

    def _list(self, query: Query) -> Answer:
        found, held = self._index.find(query, limit=PAGE), self._index.held()
        rows = [
            {
                "line": summary,
                "url": query.at().url(f"/sample/{summary.id}"),
                "excerpt": self._excerpt(summary, query),
                "bar": _bar(summary, held.rewards),
            }
            for summary in found.summaries
        ]
        return self._page(
            "list.html",
            query=query,
            found=found,
            held=held,
            rows=rows,
            fates=FATES,
            pages=_places(found, query),
            progress=self._source.progress,
        )

    def _excerpt(self, summary: SampleSummary, query: Query) -> Any:
        if not query.text:
            return None
        sample = self._index.get(summary.id)
        return excerpt_of(sample, query.text) if isinstance(sample, Sample) else None

    def _sample(self, sample_id: int, query: Query) -> Answer:
        query = query.at()
        found = self._index.get(sample_id)
        problem = ""
        if not isinstance(found, Sample) or not found.summary.has_texts:
            try:
                found = self._source.fetch(sample_id) or found
            except HeterorlError as error:
                problem = str(error)
        if found is None:
            words = problem or "It was never kept, or newer samples replaced it."
            return self._refuse(HTTPStatus.NOT_FOUND, f"There is no sample {sample_id}", words)
        sample = found if isinstance(found, Sample) else Sample(summary=found, rollouts=())
        share = MAX_TOKENS // max(1, len(sample.rollouts))
        completions = [(rollout, *tokens_of(rollout, limit=share)) for rollout in sample.rollouts]
        has_ratios = any(len(rollout.log_ratios) and len(rollout.token_ids) for rollout in sample.rollouts)
        has_logprobs = any(len(rollout.sampler_logprobs) for rollout in sample.rollouts)
        return self._page(
            "sample.html",
            query=query,
            sample=sample,
            line=sample.summary,
            problem=problem,
            completions=completions,
            has_ratios=has_ratios,
            has_logprobs=has_logprobs,
            scale="ratio" if has_ratios or not has_logprobs else "probability",
            ratio_legend=ratio_legend(),
            probability_legend=probability_legend(),
            share=share,
            list_url=query.at(before=sample_id + 1).url(),
            next_url=self._next_url(query, query.at(before=sample_id)),
            previous_url=self._next_url(query, query.at(after=sample_id)),
        )

    def _next_url(self, query: Query, place: Query) -> str:
        found = self._index.next_id(place)
        return "" if found is None else query.url(f"/sample/{found}")

    def _state(self) -> Answer:
        held = self._index.held()
        found = dataclasses.asdict(self._source.progress)
        found |= {"samples": held.num_samples, "read": held.num_read, "newest": held.newest}
        return Answer(content_type="application/json", body=json.dumps(found).encode("ascii"))

    def _refuse(self, status: HTTPStatus, title: str, words: str) -> Answer:
        return self._page("refused.html", status=status, title=title, words=words)

    def _page(self, name: str, *, status: HTTPStatus = HTTPStatus.OK, **values: Any) -> Answer:
        text = self._templates.get_template(name).render(values)
        return Answer(status=status, body=text.encode("utf-8", "replace"))


def _static(name: str) -> Answer:
    if name not in _STATIC:
        return Answer(status=HTTPStatus.NOT_FOUND, content_type="text/plain; charset=utf-8", body=b"no such file\n")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Answer(content_type=f"{kind}; charset=utf-8" if kind.startswith("text/") else kind, body=_STATIC[name])


def _places(found: Found, query: Query) -> dict[str, str]:
    first, last = (found.summaries[0].id, found.summaries[-1].id) if found.summaries else (0, 0)
    newer = older = ""
    if found.has_newer:
        place = first or max(query.before - 1, 0)
        newer = query.at(after=place).url() if place else query.at().url()
    if found.has_older:
        older = query.at(before=last or query.after + 1).url()
    return {"newer": newer, "older": older, "newest": query.at().url() if query.before or query.after else ""}


def _bar(summary: SampleSummary, span: tuple[float, float]) -> dict[str, float] | None:
    low, high = span
    values = (summary.reward_min, summary.reward_mean, summary.reward_max)
    if any(value is None for value in values) or high <= low:
        return None
    begin, middle, end = (round(100 * (value - low) / (high - low), 1) for value in values if value is not None)
    return {"begin": begin, "middle": middle, "end": end}


def number(value: float | None, digits: int = 3) -> str:
    """A number as text; a dash for None and non-finite values."""
    if value is None or not math.isfinite(value):
        return "-"
    text = f"{value:.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


def when(seconds: float) -> str:
    """Seconds since the epoch as local time."""
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "-"


@contextlib.contextmanager
def redirect_file(url: str) -> Iterator[Path]:
    """A temporary file that redirects a browser to a URL.
    The URL has a key, which the process list must not show."""
    with tempfile.TemporaryDirectory(prefix="heterorl-view-") as directory:
        path = Path(directory) / "open.html"
        place = html.escape(url, quote=True)
        words = f'<!doctype html><meta http-equiv="refresh" content="0;url={place}"><a href="{place}">Samples</a>\n'
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:  # noqa: PTH123 - of a descriptor
            file.write(words)
        yield path


@contextlib.contextmanager
def served(make_source: Callable[[SampleIndex], Source], *, port: int = 0) -> Iterator[ViewServer]:
    """Serve a source's samples until the context ends, then delete the index.
    Raises ConfigError for a taken port, or a source's error."""
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
