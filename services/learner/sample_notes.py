"""Notes of sampled groups: texts and log-ratios, sent while training continues.

    trained     remembers a group whose note is wanted, until its version is out     training loop
    published   puts its note and the notes of rejected groups into the queue        training loop, feed
    evaluated   puts the samples of an evaluation into the queue                     training loop
    run         makes one note after another in a thread, and sends it               queue

A prompt is shown as the task has it, its messages under their roles; with other tokens than task and template give, as
the model read it.

Guarantees: no step waits for a note or fails by one. A note beyond the bounds of the queue, or that cannot be read or
is refused, is given up and counted. A note is sent once its group is settled, so that the coordinator knows it.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from heterorl.common.api import LearnerApi
from heterorl.common.errors import HeterorlError, PromptRefused
from heterorl.common.process.metrics import SAMPLE_NOTES
from heterorl.common.process.threads import in_thread
from heterorl.common.tasks.task import Prompt, Task
from heterorl.common.text.conversation import Conversations
from heterorl.common.text.prompter import Prompter
from heterorl.common.text.token_text import TokenTexts
from heterorl.common.types.common import Float32Array, Int32Array
from heterorl.common.types.rollout import Group, GroupId, QueuedGroup, Span, spread
from heterorl.common.types.sample import EvaluationSample, RolloutNote, SampleNote, shown_answer
from heterorl.learner.train.step_report import LogRatios

_LOG = logging.getLogger(__name__)
_NONE = np.zeros(0, np.float32)
MAX_WAITING = 256
"""Notes in the queue, and groups of steps that are in no version yet."""
MAX_WAITING_BYTES = 256 << 20
"""Memory of their groups."""
FINISH_S = 5.0
"""Longest wait of the end of a run for the notes of its last version."""
EVALUATIONS_AT_ONCE = 32
"""Most held-out prompts in one message."""
_Ratios = Mapping[int, Float32Array]


class NoteReader:
    """Decodes groups with the run's tokenizer, and finds their answers."""

    def __init__(self, prompter: Prompter, task: Task, conversations: Conversations | None = None) -> None:
        """Keep them; `conversations` have the tools that prompts show."""
        self._prompter = prompter
        self._task = task
        encode: Callable[[Prompt], Int32Array] = prompter.encode_prompt
        self._encode = encode if conversations is None else conversations.encode
        self._texts = TokenTexts(decode=prompter.decode, decode_given=self._decode_raw)

    def note(self, group: Group, ratios: Mapping[int, Float32Array], *, limit_bytes: int) -> SampleNote:
        """The note of a group.

        `ratios` are log p - log q of each trained token, by number of a trained rollout. If the message would be
        larger than about `limit_bytes`, numbers of tokens are left out.
        """
        prompt, answer = self._asked(group)
        rollouts = []
        for number, rollout in enumerate(group.rollouts):
            # The coordinator's group has no stale tokens: a policy drew them.
            spans = [replace(span, version=0) if span.is_stale else span for span in rollout.spans]
            text, ends = self._texts.read(rollout.token_ids, spans)
            ratios_N = _with_stale(ratios.get(number, _NONE), rollout.spans)
            rollouts.append(RolloutNote(completion=text, reward_parts=(), log_ratios=ratios_N, token_ends=ends))
        if _num_bytes(prompt, rollouts) > limit_bytes:
            rollouts = [RolloutNote(completion=rollout.completion, reward_parts=()) for rollout in rollouts]
        return SampleNote(group=group.id, prompt=prompt, answer=answer, rollouts=tuple(rollouts))

    def _asked(self, group: Group) -> tuple[str, str]:
        answer = ""
        # A rejected prompt that the task does not have is kept to be read.
        with contextlib.suppress(LookupError, PromptRefused):
            asked = self._task.prompt(group.prompt_index)
            answer = shown_answer(asked.answer)
            if np.array_equal(self._encode(asked), group.prompt_token_ids):
                return asked.shown, answer
        return self._decode_raw(group.prompt_token_ids), answer

    def _decode_raw(self, token_ids: Int32Array) -> str:
        return self._prompter.decode(token_ids, keeps_special=True)


def _with_stale(ratios_N: Float32Array, spans: Sequence[Span]) -> Float32Array:
    """Numbers of all tokens that a policy drew; NaN at stale ones."""
    said = [span for span in spans if span.is_drawn or span.is_stale]
    is_drawn = np.repeat([span.is_drawn for span in said], [span.end - span.start for span in said])
    if not ratios_N.size or is_drawn.all():
        return ratios_N
    return spread(ratios_N, is_drawn)


def _num_bytes(prompt: str, rollouts: Sequence[RolloutNote]) -> int:
    texts = len(prompt.encode()) + sum(len(rollout.completion.encode()) for rollout in rollouts)
    return texts + sum(4 * len(rollout.log_ratios) + 3 * len(rollout.token_ends) for rollout in rollouts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Settled:
    group: Group
    ratios: _Ratios


_Entry = _Settled | Sequence[EvaluationSample]


@dataclass(slots=True, kw_only=True)
class SampleNotes:
    """The notes of one lease; none without a reader."""

    api: LearnerApi | None = None
    epoch: int = 0
    reader: NoteReader | None = None
    limit_bytes: int = 8 << 20
    """About the largest message; see NoteReader."""
    _trained: dict[GroupId, _Settled] = field(default_factory=dict)
    _queue: asyncio.Queue[_Entry] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING))
    _held_bytes: int = 0
    _is_said: bool = False

    def begin(self) -> None:
        """Forget groups of steps that were undone."""
        while self._trained:
            self._held_bytes -= _size(self._trained.popitem()[1])

    def trained(self, groups: Sequence[QueuedGroup], ratios: LogRatios) -> None:
        """Remember the groups of a step whose note is wanted."""
        if self.reader is None:
            return
        for number, queued in enumerate(groups):
            if queued.wants_note and len(self._trained) < MAX_WAITING:
                own = {rollout: values for (group, rollout), values in ratios.items() if group == number}
                entry = _Settled(group=queued.group, ratios=own)
                if self._has_room(entry):
                    self._trained[queued.group.id] = entry
                    self._held_bytes += _size(entry)

    def published(self, ids: Iterable[GroupId]) -> None:
        for group_id in ids:
            entry = self._trained.pop(group_id, None)
            if entry is not None:
                self._held_bytes -= _size(entry)
                self._put(entry)

    def rejected(self, groups: Iterable[Group]) -> None:
        """Send the notes of all groups that failed a check."""
        for group in groups:
            self._put(_Settled(group=group, ratios={}))

    def abandoned(self, groups: Iterable[QueuedGroup]) -> None:
        for queued in groups:
            if queued.wants_note:
                self._put(_Settled(group=queued.group, ratios={}))

    def evaluated(self, samples: Sequence[EvaluationSample]) -> None:
        some: list[EvaluationSample] = []
        for sample in samples:
            if len(some) == EVALUATIONS_AT_ONCE or (some and _size([*some, sample]) > self.limit_bytes):
                self._put(some)
                some = []
            some.append(sample)
        if some:
            self._put(some)

    def _put(self, entry: _Entry) -> None:
        if self.reader is None or not self._has_room(entry):
            return
        try:
            self._queue.put_nowait(entry)
        except asyncio.QueueFull:
            self._gave_up("more groups than notes can be sent of")
        else:
            self._held_bytes += _size(entry)

    def _has_room(self, entry: _Entry) -> bool:
        has_room = self._held_bytes + _size(entry) <= MAX_WAITING_BYTES
        if not has_room:
            self._gave_up("larger groups than notes can be sent of")
        return has_room

    async def run(self) -> None:
        while True:
            entry = await self._queue.get()
            try:
                await self._send(entry)
            finally:
                self._held_bytes -= _size(entry)
                self._queue.task_done()

    async def finish(self) -> None:
        """Wait at most 5 s until all notes are sent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                await self._queue.join()

    async def _send(self, entry: _Entry) -> None:
        assert self.reader is not None, "notes are queued with a reader only"
        assert self.api is not None, "a reader comes with a coordinator"
        try:
            if isinstance(entry, _Settled):
                note = await in_thread(self.reader.note, entry.group, entry.ratios, limit_bytes=self.limit_bytes)
                await self.api.note_samples(epoch=self.epoch, notes=[note])
            else:
                await self.api.note_samples(epoch=self.epoch, notes=[], evaluations=entry)
        except Exception as error:  # noqa: BLE001 - the run goes on without a note
            # A tokenizer's message may hold a completion: log its type only.
            self._gave_up(str(error) if isinstance(error, HeterorlError) else type(error).__name__)
        else:
            SAMPLE_NOTES.labels("sent").inc()

    def _gave_up(self, why: str) -> None:
        SAMPLE_NOTES.labels("given_up").inc()
        # Only the first: a coordinator of an earlier release refuses each.
        _LOG.log(
            logging.DEBUG if self._is_said else logging.WARNING,
            "the learner leaves a sample without its text, training goes on: %s",
            why,
        )
        self._is_said = True


def _size(entry: _Entry) -> int:
    if isinstance(entry, _Settled):
        arrays = [entry.group.prompt_token_ids, *entry.ratios.values()]
        arrays += [array for rollout in entry.group.rollouts for array in (rollout.token_ids, rollout.sampler_logprobs)]
        return sum(int(array.nbytes) for array in arrays)
    rollouts = [rollout for sample in entry for rollout in sample.rollouts]
    texts = [*(sample.prompt for sample in entry), *(rollout.completion for rollout in rollouts)]
    arrays = [array for rollout in rollouts for array in (rollout.token_ids, rollout.sampler_logprobs)]
    return sum(map(sys.getsizeof, texts)) + sum(array.nbytes for array in arrays)
