"""Which tokens end a completion, as a model's own files say: one, or several where turns and texts end differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from heterorl.common.errors import ConfigError
from heterorl.common.model.template import ChatTemplate
from heterorl.common.types.common import MAX_END_TOKENS

_KEY = "eos_token_id"
_ANSWER = "Yes"


def end_token_ids(model_dir: str, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a completion, ascending: those of generation_config.json, or of config.json where it names none, and
    the tokenizer's own, which written texts end with.

    Raises:
        ConfigError: what a file names is no list of token ids.
    """
    named = _named(model_dir)
    listed = named if isinstance(named, list) else [] if named is None else [named]
    if not all(_is_id(number) for number in listed) or len(listed) >= MAX_END_TOKENS:
        raise ConfigError("model_dir", f"{_KEY} in the files of {model_dir} is no list of token ids: {named!r}"[:300])
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return tuple(sorted({*listed, *own}))


def turn_end(template: ChatTemplate) -> str:
    """What a chat template writes behind an assistant's answer.

    Raises:
        TemplateError: it writes no such turn; what it computes may raise what Python raises.
    """
    turns = [{"role": "user", "content": _ANSWER}, {"role": "assistant", "content": _ANSWER}]
    return template.write(turns, begins_answer=False).rpartition(_ANSWER)[2]


def _is_id(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _named(model_dir: str) -> Any:
    named = _read(model_dir, "generation_config.json").get(_KEY)
    if named is not None:
        return named
    config = _read(model_dir, "config.json")
    # A model that has one of text inside says it there.
    inner = config.get("text_config")
    return config.get(_KEY, inner.get(_KEY) if isinstance(inner, dict) else None)


def _read(model_dir: str, name: str) -> dict[str, Any]:
    """A file of a directory or of the hub; empty where there is none."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(model_dir, name)
        if path is None:
            return {}
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError:
        return {}
    except ValueError as error:
        raise ConfigError("model_dir", f"{name} of {model_dir} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}
