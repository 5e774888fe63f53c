"""A file of one JSON object a line with the fields `prompt` and `answer`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from services.common.errors import ConfigError
from services.common.tasks.math_verify import MathVerifier
from services.common.tasks.task import Prompt
from services.common.types import Digest, RewardPart
from services.common.wire import bytes_digest

MAX_LINE_BYTES = 1 << 20


class JsonlTask:
    """Implements services.common.tasks.task.Task; the last `evaluation_size` lines (at most half) are held out."""

    def __init__(
        self, *, path: Path, evaluation_size: int, match: Literal["exact", "math_verify"], verify_timeout_s: float
    ) -> None:
        rows = _read(path)
        num_held_out = min(evaluation_size, len(rows) // 2)
        if not num_held_out:
            raise ConfigError("task.name", f"{path} has {len(rows)} lines; at least 2 are needed")
        self.num_evaluation_prompts = num_held_out
        self.num_prompts = len(rows) - num_held_out
        self._rows = rows
        self._verifier = MathVerifier(timeout_s=verify_timeout_s) if match == "math_verify" else None
        self.digest: Digest = bytes_digest(json.dumps([match, num_held_out, rows]).encode())

    def prompt(self, index: int) -> Prompt:
        """The training prompt at a position."""
        text, answer = self._rows[index]
        return Prompt(index=index, text=text, answer=answer)

    def evaluation_prompt(self, index: int) -> Prompt:
        """The held-out prompt at a position."""
        text, answer = self._rows[self.num_prompts + index]
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


def _read(path: Path) -> list[tuple[str, str]]:
    rows = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError("task.name", f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    rows.append(_row(path, number, line))
    except OSError as error:
        raise ConfigError("task.name", f"cannot read {path}: {error.strerror}") from error
    return rows


def _row(path: Path, number: int, line: bytes) -> tuple[str, str]:
    try:
        entry = json.loads(line)
        prompt, answer = entry["prompt"], entry["answer"]
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{path}, line {number}: {error!r}"
        raise ConfigError("task.name", problem, action='write {"prompt": ..., "answer": ...}') from error
    if not isinstance(prompt, str) or not isinstance(answer, str | int | float):
        raise ConfigError("task.name", f"{path}, line {number}: prompt must be text, answer text or a number")
    return prompt, str(answer)
