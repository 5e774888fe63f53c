"""What a completion answers: its text without the thoughts that a reasoning model writes before the answer."""

from __future__ import annotations

import re

_TAG = re.compile(r"<(/?)think>")


def answer_of(completion: str) -> str:
    """The completion without its thoughts: inside `<think>...</think>`, before a lone end, and behind a lone beginning.

    A template may open the thoughts in the prompt, so the end alone tells that what stands before it is thought.
    """
    kept: list[str] = []
    start, is_thinking = 0, False
    for tag in _TAG.finditer(completion):
        if tag.group(1):
            if not is_thinking:
                kept.clear()
            start, is_thinking = tag.end(), False
        elif not is_thinking:
            kept.append(completion[start : tag.start()])
            is_thinking = True
    if not is_thinking:
        kept.append(completion[start:])
    return "".join(kept)
