"""Several engines behind one Engine Protocol, with one version and one identity.

    submit   the engine with the least load takes the whole request
    collect  returns what ended on any engine; one thread for each engine waits in its `collect`
    load     on all engines at once; an engine that fails is out, the others continue

An engine that is out gets no request until a `load` succeeds on it; its requests become `Lost`. EngineError is raised
only if no engine is left. Except during `load`, `version` is the version of every engine that is not out. Another
`load` of the same version restarts the engines that are out and leaves the others alone.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import numpy as np

from heterorl.common.errors import EngineError
from heterorl.common.generation.inference_engine import Engine, Finished, Lost, Request, ScoredText
from heterorl.common.types.common import Float32Array
from heterorl.common.weights.arena import Arena

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Member:
    """One engine; `in_flight` maps the group's request number to completions that are missing."""

    number: int
    engine: Engine
    is_out: bool = False
    in_flight: dict[int, int] = field(default_factory=dict)

    @property
    def load_share(self) -> float:
        return sum(self.in_flight.values()) / self.engine.max_running


class EngineGroup:
    """Implements heterorl.common.generation.inference_engine.Engine around several engines of one kind."""

    def __init__(
        self, engines: Sequence[Engine], *, staged: Callable[[Arena], AbstractContextManager[None]] | None = None
    ) -> None:
        """Take at least one engine, all of one layout, name and dtype; `close` does not close them.

        `staged` is a context around a load on all engines: it prepares the weights once.
        """
        self._members = [_Member(number, engine) for number, engine in enumerate(engines)]
        self._staged = staged or (lambda _: nullcontext())
        self.layout, self.name, self.dtype = engines[0].layout, engines[0].name, engines[0].dtype
        self.version = engines[0].version
        """Version of all engines that are not out; -1 before the first `load`, and if all are out."""
        # Guards all fields below, and the members.
        self._news = threading.Condition()
        self._ended: list[Finished | Lost] = []
        self._keys: dict[int, int] = {}
        self._failure: EngineError | None = None
        self._defect: BaseException | None = None
        self._num_cancels = 0
        self._is_closed = False
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._gather, args=(member,), name=f"engine-{member.number}", daemon=True)
            for member in self._members
        ]
        for thread in self._threads:
            thread.start()

    @property
    def max_running(self) -> int:
        """Completions computed at once by the engines that are not out."""
        return sum(member.engine.max_running for member in self._living() or self._members)

    @property
    def is_whole(self) -> bool:
        """Whether no engine is out."""
        return len(self._living()) == len(self._members)

    def load(self, arena: Arena, version: int) -> None:
        """Swap the weights of all; with the current version, restart the engines that are out."""
        # A new version does not wait for an engine that is out: a start would delay the others.
        is_out = [member for member in self._members if member.is_out]
        wanted = is_out if version == self.version else self._living() or self._members
        with self._staged(arena), ThreadPoolExecutor(len(self._members)) as threads:
            failures = list(threads.map(lambda member: self._loaded(member, arena, version), wanted))
        with self._news:
            if self._living():
                self.version = version
                return
        raise next((failure for failure in failures if failure is not None), EngineError("all engines are out"))

    def score(self, texts: Sequence[ScoredText]) -> list[Float32Array]:
        """The scores of the engine that is farthest from the median: one wrong engine shows in the canary."""
        answers: list[list[Float32Array]] = []
        failure: EngineError | None = None
        for member in self._living():
            try:
                answers.append(member.engine.score(texts))
            except EngineError as error:
                failure = error
                self._put_out(member, error)
        if not answers:
            raise failure or EngineError("all engines are out")
        return _farthest(answers)

    def submit(self, request: Request) -> None:
        with self._news:
            while living := self._living():
                member = min(living, key=lambda one: one.load_share)
                number = next(self._numbers)
                try:
                    member.engine.submit(replace(request, key=number))
                except EngineError as error:
                    self._put_out(member, error)
                    continue
                member.in_flight[number] = request.num_completions
                self._keys[number] = request.key
                self._news.notify_all()
                return
        raise EngineError("all engines are out: nothing is generated before a version is loaded")

    def collect(self) -> list[Finished | Lost]:
        """Wait until a completion ended on any engine or an engine is out; returns all that ended."""
        with self._news:
            num_cancels = self._num_cancels
            self._news.wait_for(
                lambda: (
                    self._ended or self._failure or self._defect or not self._keys or self._num_cancels != num_cancels
                )
            )
            if self._defect:
                raise self._defect
            if self._failure and not self._ended:
                failure = self._failure
                self._drop()
                raise failure
            ended, self._ended = self._ended, []
            return ended

    def cancel(self) -> None:
        with self._news:
            self._drop()

    def close(self) -> None:
        """End the threads; the owner closes the engines."""
        with self._news:
            self._is_closed = True
            self._drop()
        for thread in self._threads:
            thread.join()

    def _living(self) -> list[_Member]:
        return [member for member in self._members if not member.is_out]

    def _loaded(self, member: _Member, arena: Arena, version: int) -> EngineError | None:
        try:
            member.engine.load(arena, version)
        except (EngineError, OSError) as error:
            # A file that cannot be written puts one engine out; the engines that loaded go on.
            failure = error if isinstance(error, EngineError) else EngineError(f"its weights: {error}")
            self._put_out(member, failure)
            return failure
        with self._news:
            member.is_out = False
        return None

    def _gather(self, member: _Member) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_closed or member.in_flight)
                if self._is_closed:
                    return
            try:
                ended = member.engine.collect()
            except EngineError as error:
                self._put_out(member, error)
                continue
            except Exception as error:  # noqa: BLE001 - `collect` raises it, as the engine alone would
                with self._news:
                    self._defect = error
                    self._news.notify_all()
                return
            with self._news:
                for one in ended:
                    self._note(member, one)
                self._news.notify_all()

    def _note(self, member: _Member, one: Finished | Lost) -> None:
        # A cancelled request has no key any more.
        if one.key not in member.in_flight:
            return
        self._ended.append(replace(one, key=self._keys[one.key]))
        member.in_flight[one.key] -= 1
        if isinstance(one, Lost) or not member.in_flight[one.key]:
            del member.in_flight[one.key], self._keys[one.key]

    def _put_out(self, member: _Member, error: EngineError) -> None:
        """Take an engine out and report its requests as lost; an error instead if no engine is left."""
        with self._news:
            lost, member.in_flight = list(member.in_flight), {}
            if not member.is_out:
                _LOG.error(
                    "engine %d of %d is out until it has loaded a version: %s",
                    member.number, len(self._members), error,
                )  # fmt: skip
            member.is_out = True
            member.engine.cancel()
            self._ended += [Lost(key=self._keys.pop(number)) for number in lost]
            if not self._living():
                self.version = -1
                finished: list[Finished | Lost] = [one for one in self._ended if isinstance(one, Finished)]
                # The error says more than a `Lost` for each request.
                if len(finished) < len(self._ended):
                    self._failure = error
                self._ended = finished
            self._news.notify_all()

    def _drop(self) -> None:
        self._num_cancels += 1
        self._ended, self._keys, self._failure = [], {}, None
        for member in self._members:
            member.in_flight = {}
            with suppress(EngineError):
                member.engine.cancel()
        self._news.notify_all()


def _farthest(answers: Sequence[list[Float32Array]]) -> list[Float32Array]:
    if len(answers) == 1 or not answers[0]:
        return answers[0]
    flat = np.array([np.concatenate(answer) for answer in answers])
    distances = np.abs(flat - np.median(flat, axis=0)).mean(axis=1)
    # Of two at the same distance, the one with lower log-probs: wrong weights have these.
    order = np.lexsort((flat.mean(axis=1), -distances))
    return answers[int(order[0])]
