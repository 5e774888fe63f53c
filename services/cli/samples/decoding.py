"""Text of groups that the learner sent none of: decoded here, with the run's tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.types.sample import Sample

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
    return lambda sample: _decoded(sample, loaded)


def _decoded(sample: Sample, tokenizer: Any) -> Sample:
    if sample.summary.has_texts or not sample.prompt_token_ids.size:
        return sample
    return dataclasses.replace(
        sample,
        summary=dataclasses.replace(sample.summary, has_texts=True),
        prompt=tokenizer.decode(sample.prompt_token_ids.tolist(), skip_special_tokens=False),
        rollouts=tuple(
            dataclasses.replace(
                rollout, completion=tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=True)
            )
            for rollout in sample.rollouts
        ),
    )
