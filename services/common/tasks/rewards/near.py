"""Completions whose reward took so long that another machine may come to another value without fault."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

NEAR = 0.25
"""Share of a time limit beyond which another machine may come to another result."""
_REMEMBERED = 4096


class NearLimit:
    """The last ones of them."""

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def add(self, prompt: object, completion: str) -> None:
        """Remember one of a prompt's number, or of its answer; the oldest is forgotten for it."""
        self._names[_name(prompt, completion)] = None
        while len(self._names) > _REMEMBERED:
            self._names.popitem(last=False)

    def has(self, prompt: object, completion: str) -> bool:
        """Whether it is one of them."""
        return _name(prompt, completion) in self._names


def _name(prompt: object, completion: str) -> bytes:
    return hashlib.sha256(f"{prompt}\n{completion}".encode(errors="surrogatepass")).digest()
