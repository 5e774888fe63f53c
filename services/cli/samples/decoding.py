"""Text of groups that the learner sent none of: decoded here, with the run's tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.text.texts import Texts
from heterorl.common.types.common import Int32Array
from heterorl.common.types.sample import Sample, SampleRollout

Decode = Callable[[Sample], Sample]


def decoder(tokenizer: str) -> Decode:
    """What gives a sample its texts; one that has them stays as it is.

    Args:
        tokenizer: a Hugging Face directory or hub id; empty: nothing is decoded.

    Raises:
        ConfigError: there is no tokenizer.
        DependencyMissing: transformers is not installed.
    """
    if not tokenizer:
        return lambda sample: sample
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise DependencyMissing("transformers", "sampler") from error
    try:
        loaded: Any = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError("--tokenizer", f"cannot load one from {tokenizer}: {first}") from error

    def text(token_ids: Int32Array, *, with_special: bool) -> str:
        found: str = loaded.decode(
            token_ids.tolist(), skip_special_tokens=not with_special, clean_up_tokenization_spaces=False
        )
        return found

    decode_given = partial(text, with_special=True)
    texts = Texts(decode=partial(text, with_special=False), decode_given=decode_given)
    return lambda sample: _decoded(sample, texts, decode_given)


def _decoded(sample: Sample, texts: Texts, decode_raw: Callable[[Int32Array], str]) -> Sample:
    if sample.summary.has_texts or not sample.prompt_token_ids.size:
        return sample
    return dataclasses.replace(
        sample,
        summary=dataclasses.replace(sample.summary, has_texts=True),
        prompt=decode_raw(sample.prompt_token_ids),
        rollouts=tuple(_read(rollout, texts) for rollout in sample.rollouts),
    )


def _read(rollout: SampleRollout, texts: Texts) -> SampleRollout:
    completion, token_ends = texts.read(rollout.token_ids, rollout.spans)
    return dataclasses.replace(rollout, completion=completion, token_ends=token_ends)
