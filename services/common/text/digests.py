"""What names a run's tokenizer and template: two nodes with equal digests write the same ids of the same messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from heterorl.common.text.template import CLOCK, DATE, has_clock, source_of
from heterorl.common.types.common import Digest
from heterorl.common.wire.common import bytes_digest


def tokenizer_digest(tokenizer: Any) -> Digest:
    """Digest of everything that turns text into ids: the whole fast tokenizer, or vocabulary and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return bytes_digest(f"{text}\n{sorted(tokenizer.special_tokens_map.items())}".encode())


def chat_template_digest(
    tokenizer: Any, *, use_chat_template: bool, template_arguments: Mapping[str, Any] = MappingProxyType({})
) -> Digest:
    """Digest of the template that prompts go through, its arguments and its date; of nothing when none is used."""
    if not use_chat_template:
        return bytes_digest(b"")
    source, arguments = source_of(tokenizer), dict(template_arguments)
    if has_clock(source):
        arguments.setdefault(CLOCK, DATE)
    written = f"\n{json.dumps(arguments, sort_keys=True)}" if arguments else ""
    return bytes_digest(f"{source}{written}".encode())
