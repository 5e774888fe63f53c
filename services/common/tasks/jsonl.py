"""A file of one JSON object a line with the fields `prompt` and `answer`.

Held out are the lines of a second file, or else the prompts whose text has the smallest digests: a prompt that occurs
twice is on one side of the split, and adding lines moves few of the others.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from heterorl.common.errors import ConfigError
from heterorl.common.tasks.rewards.math_verify import MathVerifier
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.common import Digest
from heterorl.common.types.rollout import RewardPart
from heterorl.common.wire.common import bytes_digest

MAX_LINE_BYTES = 1 << 20
Row = tuple[str, str]
"""Prompt and answer."""


class JsonlTask:
    """Implements heterorl.common.tasks.task.Task; see the module docstring for what is held out."""

    def __init__(
        self,
        *,
        path: Path,
        evaluation_path: Path | None,
        evaluation_size: int,
        match: Literal["exact", "math_verify"],
        timeout_s: float,
        num_workers: int = 1,
    ) -> None:
        if evaluation_path is None:
            self._training, self._held_out = _split(path, _read("task.name", path), evaluation_size)
        else:
            self._training = _read("task.name", path)
            self._held_out = _read("task.evaluation_path", evaluation_path)
            _refuse_overlap(path, self._training, evaluation_path, self._held_out)
        self.num_prompts = len(self._training)
        self.num_evaluation_prompts = len(self._held_out)
        self._verifier = MathVerifier(timeout_s=timeout_s, num_workers=num_workers) if match == "math_verify" else None
        self.num_workers = num_workers if self._verifier else 1
        self.digest: Digest = bytes_digest(json.dumps([match, self._training, self._held_out]).encode())

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        text, answer = self._training[index]
        return Prompt(index=index, text=text, answer=answer)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        text, answer = self._held_out[index]
        return Prompt(index=index, text=text, answer=answer)

    def score(self, prompt: Prompt, completion: str) -> tuple[RewardPart, ...]:
        """1 for a matching answer, else 0.

        Raises:
            RewardError: the verifier crashed or timed out.
        """
        if self._verifier is None:
            is_right = completion.strip() == prompt.answer.strip()
        else:
            is_right = self._verifier.verify(answer=prompt.answer, completion=completion)
        return (RewardPart(name="correct", value=float(is_right)),)

    def close(self) -> None:
        """Kill the verifier's processes."""
        if self._verifier is not None:
            self._verifier.close()


def _split(path: Path, rows: list[Row], evaluation_size: int) -> tuple[list[Row], list[Row]]:
    """Hold out `evaluation_size` different prompts, at most half of them, with every line that repeats one."""
    ranked = sorted({text for text, _ in rows}, key=lambda text: hashlib.blake2b(text.encode()).digest())
    held_out = set(ranked[: min(evaluation_size, len(ranked) // 2)])
    if not held_out:
        problem = f"{path} has {len(ranked)} different prompts; at least 2 are needed"
        raise ConfigError("task.name", problem, action="add prompts, or name a file in task.evaluation_path")
    return [row for row in rows if row[0] not in held_out], [row for row in rows if row[0] in held_out]


def _refuse_overlap(path: Path, training: list[Row], evaluation_path: Path, held_out: list[Row]) -> None:
    for key, file, rows in (("task.name", path, training), ("task.evaluation_path", evaluation_path, held_out)):
        if not rows:
            raise ConfigError(key, f"{file} has no prompts")
    trained = {text for text, _ in training}
    shared = [text for text, _ in held_out if text in trained]
    if shared:
        problem = f"{len(shared)} prompts of {evaluation_path} are also in {path}, the first is {shared[0][:80]!r}"
        raise ConfigError("task.evaluation_path", problem, action="remove them from one of the files")


def _read(key: str, path: Path) -> list[Row]:
    rows = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(key, f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    rows.append(_row(key, f"{path}, line {number}", line))
    except OSError as error:
        raise ConfigError(key, f"cannot read {path}: {error.strerror}") from error
    return rows


def _row(key: str, place: str, line: bytes) -> Row:
    try:
        entry = json.loads(line)
        prompt, answer = entry["prompt"], entry["answer"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(key, f"{place}: {error!r}", action='write {"prompt": ..., "answer": ...}') from error
    # A bool is an int to Python, and no answer in a file.
    if not isinstance(prompt, str) or not isinstance(answer, str | int | float) or isinstance(answer, bool):
        raise ConfigError(key, f"{place}: prompt must be text, answer text or a number")
    if not prompt:
        raise ConfigError(key, f"{place}: prompt is empty")
    try:
        f"{prompt}{answer}".encode()
    except UnicodeEncodeError as error:
        raise ConfigError(key, f"{place}: half a surrogate pair is no text") from error
    return prompt, str(answer)
