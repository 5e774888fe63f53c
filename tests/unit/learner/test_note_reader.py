"""Tokens as text: each token ends where its text ends, whatever tokenizer made it; else nothing is claimed."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from heterorl.common.tasks.task import Message, Prompt
from heterorl.common.text.token_text import TokenTexts
from heterorl.common.types.common import SiteId
from heterorl.common.types.rollout import GIVEN, FinishReason, Group, GroupId, Rollout, Span, without_stale
from heterorl.common.types.sample import SampleRollout
from heterorl.learner.sample_notes import NoteReader

CORPUS = ["what is 12 + 34? the answer is 46.", "let us think step by step, then say it", "naive cafe 123 \u00e9\u4e2d"]


class FourPrompts:
    """What a Reader needs of a Task: four prompts with answers."""

    def prompt(self, index):
        return Prompt(index=index, text="12 * ?", answer=("0", "8", "16", "24")[index])


TASK = FourPrompts()


class Prompts:
    """What a Reader needs of a Prompter."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode_prompt(self, prompt):
        return np.array(self.tokenizer.encode(prompt.text), np.int32)

    def decode(self, ids, *, keeps_special=False):
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=not keeps_special)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)


def metaspace():
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("<eos>", 0.0)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>", "<eos>"], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


BYTES, WORDS = byte_level(), metaspace()


def texts_of(prompts):
    return TokenTexts(
        decode=lambda ids: prompts.decode(ids), decode_given=lambda ids: prompts.tokenizer.decode(ids.tolist())
    )


def pieces(texts, prompts, ids):
    text = prompts.decode(ids)
    ends = texts.ends(ids, text).tolist()
    return text, [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40))
def test_every_token_ends_where_its_text_ends(text):
    prompts = Prompts(BYTES)
    ids = np.array([*BYTES.encode(text), BYTES.eos_token_id], np.int32)

    decoded, found = pieces(texts_of(prompts), prompts, ids)

    assert decoded == text
    assert len(found) == len(ids)
    assert "".join(found) == text
    # The end token is no text.
    assert found[-1] == ""


def test_character_of_several_tokens_is_the_text_of_its_last_one():
    prompts = Prompts(BYTES)
    ids = np.array(BYTES.encode("a\U0001f600b"), np.int32)

    _, found = pieces(texts_of(prompts), prompts, ids)

    assert found[0] == "a"
    assert found[-1] == "b"
    assert [piece for piece in found[1:-1] if piece] == ["\U0001f600"]


def test_text_that_breaks_off_in_a_character_ends_with_its_last_token():
    prompts = Prompts(BYTES)
    ids = np.array(BYTES.encode("a\U0001f600"), np.int32)[:-1]

    text, found = pieces(texts_of(prompts), prompts, ids)

    assert text.startswith("a")
    assert "".join(found) == text
    assert len(found) == len(ids)


def test_space_before_a_word_belongs_to_the_word():
    prompts = Prompts(WORDS)
    ids = np.array(WORDS.encode("the answer is 46"), np.int32)

    text, found = pieces(texts_of(prompts), prompts, ids)

    assert "".join(found) == text
    assert len(found) == len(ids)


def test_what_does_not_come_out_even_has_no_ends():
    texts = texts_of(Prompts(BYTES))
    ids = np.array(BYTES.encode("the answer"), np.int32)

    assert texts.ends(ids, "another text").size == 0
    assert texts.ends(ids, "the answer and more").size == 0
    assert texts.ends(ids, "the").size == 0


def group_of(texts):
    rollouts = []
    for text in texts:
        ids = np.array([*BYTES.encode(text), BYTES.eos_token_id], np.int32)
        rollouts.append(
            Rollout(
                token_ids=ids, sampler_logprobs=-np.ones(ids.size, np.float32),
                spans=(Span(version=0, start=0, end=ids.size),), reward=1.0, reward_parts=(),
                finish_reason=FinishReason.EOS,
            )
        )  # fmt: skip
    return Group(
        id=GroupId(site=SiteId("a"), incarnation="i", sequence=1), assignment=1, prompt_index=0,
        prompt_token_ids=np.array([*BYTES.encode("what is 12"), BYTES.eos_token_id], np.int32),
        rollouts=tuple(rollouts), oldest_version=0, state_root="0" * 64, generation_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(("index", "answer"), [(3, "24"), (99, "")])
def test_note_has_the_answer_that_the_task_expects(index, answer):
    group = dataclasses.replace(group_of(["it is 46", "no"]), prompt_index=index)

    assert NoteReader(Prompts(BYTES), TASK).note(group, {}, limit_bytes=1 << 20).answer == answer


def test_a_prompt_that_the_template_wrote_is_shown_as_its_messages():
    group, prompts = group_of(["it is 46"]), Prompts(BYTES)
    prompts.encode_prompt = lambda _: group.prompt_token_ids
    asked = Prompt(index=0, text="what is 12", answer="24")
    said = (Message(role="system", content="be brief"), Message(role="user", content="what is 12"))

    def shown(prompt):
        task = SimpleNamespace(prompt=lambda _: prompt)
        return NoteReader(prompts, task).note(group, {}, limit_bytes=1 << 20).prompt

    assert shown(asked) == "what is 12"
    assert shown(dataclasses.replace(asked, messages=said)) == "system:\nbe brief\n\nuser:\nwhat is 12"
    # What a site wrote otherwise is what there is to see.
    prompts.encode_prompt = lambda _: group.prompt_token_ids[:-1]
    assert shown(asked) == "what is 12<eos>"


def test_a_prompt_that_shows_tools_is_shown_as_its_messages():
    group = group_of(["it is 46"])
    task = SimpleNamespace(prompt=lambda _: Prompt(index=0, text="what is 12", answer="24"))
    with_tools = SimpleNamespace(encode=lambda _: group.prompt_token_ids)

    assert NoteReader(Prompts(BYTES), task, with_tools).note(group, {}, limit_bytes=1 << 20).prompt == "what is 12"
    # Without the tools the tokens are others.
    assert NoteReader(Prompts(BYTES), task).note(group, {}, limit_bytes=1 << 20).prompt == "what is 12<eos>"


def test_note_has_the_prompt_as_the_model_saw_it_and_the_ratios_of_what_was_trained_on():
    group = group_of(["it is 46", "no"])
    ratios = {1: np.array([0.5] * group.rollouts[1].token_ids.size, np.float32)}

    note = NoteReader(Prompts(BYTES), TASK).note(group, ratios, limit_bytes=1 << 20)

    assert note.group == group.id
    assert note.prompt == "what is 12<eos>"
    assert [rollout.completion for rollout in note.rollouts] == ["it is 46", "no"]
    assert [rollout.log_ratios.size for rollout in note.rollouts] == [0, ratios[1].size]
    assert all(
        rollout.token_ends.size == member.token_ids.size
        for rollout, member in zip(note.rollouts, group.rollouts, strict=True)
    )


def test_note_that_would_be_too_large_keeps_its_text_alone():
    group = group_of(["it is 46", "no"])

    note = NoteReader(Prompts(BYTES), TASK).note(group, {}, limit_bytes=30)

    assert [rollout.completion for rollout in note.rollouts] == ["it is 46", "no"]
    assert all(rollout.token_ends.size == 0 for rollout in note.rollouts)


@pytest.mark.parametrize("count", [1, 3])
def test_token_is_decoded_once_however_often_it_comes(count, monkeypatch):
    prompts = Prompts(BYTES)
    texts = texts_of(prompts)
    ids = np.array(BYTES.encode("the answer is the answer") * count, np.int32)
    text = prompts.decode(ids)
    texts.ends(ids, text)
    decoded = []
    monkeypatch.setattr(prompts, "decode", lambda ids: decoded.append(ids) or BYTES.decode(ids.tolist()))

    texts.ends(ids, text)

    assert decoded == []


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS])
def test_each_turn_is_text_of_its_own_and_given_tokens_keep_their_marks(tokenizer):
    said = [(0, "let us think"), (GIVEN, "what is 12"), (GIVEN, "say it", 3), (0, "the"), (1, " answer is 46")]
    ids, spans = [], []
    for version, text, *keeps in said:
        own = [*tokenizer.encode(text), tokenizer.eos_token_id]
        spans.append(Span(version=version, start=len(ids), end=len(ids) + len(own), keeps=keeps[0] if keeps else None))
        ids += own
    lost = {"reward": 0.0, "reward_parts": (), "finish_reason": FinishReason.TOOL_LOST}
    turns = Rollout(
        token_ids=np.array(ids, np.int32), sampler_logprobs=np.zeros(3, np.float32), spans=tuple(spans), **lost
    )
    none = Rollout(token_ids=np.zeros(0, np.int32), sampler_logprobs=np.zeros(0, np.float32), spans=(), **lost)
    group = dataclasses.replace(group_of([]), rollouts=(turns, none))

    first, second = NoteReader(Prompts(tokenizer), TASK).note(group, {}, limit_bytes=1 << 20).rollouts

    # The end of a turn that was drawn is no text, as at the end of a completion; what was given is as the model read it.
    texts = ["let us think", "what is 12<eos>", "say it<eos>", "the answer is 46"]
    assert first.completion == "".join(texts)
    places = [0, *first.token_ends.tolist()]
    assert len(places) == len(ids) + 1
    cuts = [spans[0].end, spans[1].end, spans[2].end, spans[4].end]
    assert [places[cut] for cut in cuts] == np.cumsum([len(text) for text in texts]).tolist()
    assert (second.completion, second.token_ends.size) == ("", 0)


def test_note_of_a_masked_group_fits_the_group_that_the_coordinator_has():
    ids, spans = [], []
    for version, text in ((0, "let us think"), (GIVEN, "what is 12"), (0, "the"), (1, " answer is 46")):
        own = [*BYTES.encode(text), BYTES.eos_token_id]
        spans.append(Span(version=version, start=len(ids), end=len(ids) + len(own)))
        ids += own
    num_given = spans[1].end - spans[1].start
    member = Rollout(
        token_ids=np.array(ids, np.int32), sampler_logprobs=np.zeros(len(ids) - num_given, np.float32),
        spans=tuple(spans), reward=0.0, reward_parts=(), finish_reason=FinishReason.EOS,
    )  # fmt: skip
    whole = dataclasses.replace(group_of([]), rollouts=(member,), oldest_version=0)
    masked = without_stale(whole, oldest=1)
    ratios = np.linspace(0.1, 0.5, masked.rollouts[0].num_drawn, dtype=np.float32)
    reader = NoteReader(Prompts(BYTES), TASK)

    (told,) = reader.note(masked, {0: ratios}, limit_bytes=1 << 20).rollouts

    (expected,) = reader.note(whole, {}, limit_bytes=1 << 20).rollouts
    assert (told.completion, told.token_ends.tolist()) == (expected.completion, expected.token_ends.tolist())
    assert told.log_ratios.size == member.num_drawn
    is_trained = ~np.isnan(told.log_ratios)
    assert np.flatnonzero(is_trained).tolist() == list(range(member.num_drawn - ratios.size, member.num_drawn))
    shown = SampleRollout(log_ratios=told.log_ratios, reward=0.0, reward_parts=(), finish_reason=FinishReason.EOS)
    assert shown.log_ratio_mean == pytest.approx(float(ratios.mean()))


def test_turns_of_which_one_does_not_come_out_even_have_no_ends():
    prompts = Prompts(BYTES)
    ids = np.array([*BYTES.encode("the answer"), *BYTES.encode("is 46"), *BYTES.encode("say it")], np.int32)
    cuts = np.cumsum([0, *(len(BYTES.encode(text)) for text in ("the answer", "is 46", "say it"))]).tolist()
    versions = (0, GIVEN, 0)
    spans = tuple(
        Span(version=version, start=start, end=end)
        for version, start, end in zip(versions, cuts, cuts[1:], strict=False)
    )
    # All at once it is other words than each token alone.
    uneven = TokenTexts(decode=prompts.decode, decode_given=lambda ids: "?" * (1 + len(ids)))

    assert texts_of(prompts).read(ids, spans)[1].size == ids.size
    text, ends = uneven.read(ids, spans)
    assert (text[: len("the answer")], text[-len("say it") :]) == ("the answer", "say it")
    assert ends.size == 0


@pytest.mark.parametrize("spans", [(), (Span(version=GIVEN, start=0, end=2),), (Span(version=0, start=3, end=9),)])
def test_spans_that_are_of_other_tokens_make_it_one_completion(spans):
    prompts = Prompts(BYTES)
    ids = np.array(BYTES.encode("the answer is 46"), np.int32)

    text, ends = texts_of(prompts).read(ids, spans)

    assert (text, ends.size) == ("the answer is 46", ids.size)
