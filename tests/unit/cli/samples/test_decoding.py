"""Text that is made of tokens here reads as what a learner would have sent."""

import dataclasses

import numpy as np
import pytest

from heterorl.cli.samples.sample_reader import decoder
from heterorl.common.types.rollout import GIVEN, Span
from tests.support.samples import make_rollout, make_sample
from tests.support.tokenizers import words


@pytest.fixture
def tokenizer(tmp_path):
    made = words(eos="<|end|>")
    made.save_pretrained(tmp_path)
    return made


def sample_of(tokenizer, said):
    """A sample without texts, of one rollout of (version, text)."""
    ids, spans = [], []
    for version, text in said:
        own = tokenizer.encode(text)
        spans.append(Span(version=version, start=len(ids), end=len(ids) + len(own)))
        ids += own
    rollout = make_rollout("x", seed=1, completion="", token_ids=np.array(ids, np.int32), spans=tuple(spans))
    sample = make_sample(1)
    bare = dataclasses.replace(sample.summary, has_texts=False)
    prompt = np.array(tokenizer.encode("<|im_start|>one"), np.int32)
    return dataclasses.replace(sample, summary=bare, prompt="", prompt_token_ids=prompt, rollouts=(rollout,))


def test_a_completion_is_its_text_without_special_tokens(tokenizer, tmp_path):
    found = decoder(str(tmp_path))(sample_of(tokenizer, [(7, "one plus two<|end|>")]))

    assert (found.prompt, found.rollouts[0].completion) == ("<|im_start|>one", "one plus two")
    assert found.summary.has_texts


def test_turns_are_told_apart(tokenizer, tmp_path):
    said = [(7, "plus<|im_end|>"), (GIVEN, "<|im_start|>three<|im_end|>"), (8, "four<|end|>")]

    (rollout,) = decoder(str(tmp_path))(sample_of(tokenizer, said)).rollouts

    assert [(part.writer, text) for part, text in rollout.turn_texts] == [
        ("version 7", "plus"), ("environment", "<|im_start|>three<|im_end|>"), ("version 8", "four")
    ]  # fmt: skip


def test_a_sample_that_has_its_texts_stays_as_it_is(tokenizer, tmp_path):
    sample = make_sample(1)

    assert decoder(str(tmp_path))(sample) is sample
