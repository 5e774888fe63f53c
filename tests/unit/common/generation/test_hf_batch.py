"""Requests one by one: they join what is computed between two tokens, and each gives what it gives alone."""

import dataclasses
import threading

import numpy as np
import pytest
import torch

from heterorl.common.errors import ConfigError, EngineError, PromptRefused, PromptTooLong
from heterorl.common.generation.inference_engine import Finished, Request, ScoredText, generate_all, in_order
from heterorl.common.model import tensors
from heterorl.common.model.model_loading import token_limits_of
from heterorl.common.types.rollout import FinishReason
from tests.support.engines import PROMPTS, Truth, disturbed, hf_engine, passes_of, semantics, write_model
from tests.support.one_batch import one_batch

LIMIT = 40
SAMPLING = semantics(max_new_tokens=LIMIT)
NUM = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model_dir):
    return hf_engine(model_dir, max_new_tokens=LIMIT, engine={"batch_rows": 8})


@pytest.fixture
def widths(engine):
    return passes_of(engine, "attention_mask")


def request(key):
    return Request(key=key, prompt=PROMPTS[key % len(PROMPTS)], seed=100 + key, num_completions=NUM)


def collected(engine, *, until=lambda finished: False):
    finished = []
    while ended := engine.collect():
        finished += ended
        if until(finished):
            break
    return finished


def alone(engine, key):
    one = request(key)
    return generate_all(engine, [one.prompt], seeds=[one.seed], num_per_prompt=NUM)[0]


def assert_equal(members, others):
    for member, other in zip(members, others, strict=True):
        assert member.token_ids.tolist() == other.token_ids.tolist()
        assert member.finish_reason is other.finish_reason
        np.testing.assert_allclose(member.logprobs, other.logprobs, atol=1e-5)


def test_what_was_submitted_together_is_one_batch_bit_for_bit(model_dir):
    engine = hf_engine(model_dir, max_new_tokens=LIMIT, engine={"batch_rows": 16})
    seeds = [1, 2, 3, 4]

    groups = generate_all(engine, PROMPTS, seeds=seeds, num_per_prompt=NUM)

    expected = one_batch(engine, PROMPTS, seeds, NUM, sampling=SAMPLING)
    assert [(row.token_ids.tolist(), row.logprobs.tolist()) for members in groups for row in members] == expected
    assert len({row.token_ids.size for members in groups for row in members}) > 3


def test_requests_join_what_is_under_way_and_give_what_they_give_alone(engine, widths):
    requests = [request(key) for key in range(10)]
    for one in requests[:3]:
        engine.submit(one)
    finished = collected(engine, until=lambda finished: True)
    # While the first two are under way and the third waits.
    for one in requests[3:]:
        engine.submit(one)
    finished += collected(engine)
    passes, widths[:] = list(widths), []

    assert engine.collect() == []
    for key, members in enumerate(in_order(finished, requests)):
        assert_equal(members, alone(engine, key))
    assert max(num for num, _ in passes) <= 8
    # Two at a time as waves: every wave would last as long as its longest row.
    waves = sum(
        max(one.completion.token_ids.size for one in finished if one.key in (key, key + 1)) for key in range(0, 10, 2)
    )
    assert len(passes) < waves + 8
    # Columns that nobody reads any more are gone.
    assert max(columns for _, columns in passes) < 2 * LIMIT < len(passes)


def test_completions_come_as_they_end(engine):
    engine.submit(request(0))
    engine.submit(request(1))
    seen = []
    while ended := engine.collect():
        lengths = {one.completion.token_ids.size for one in ended}
        assert len(lengths) == 1
        seen += lengths

    assert seen == sorted(seen)
    assert len(seen) > 2


def test_where_a_recurrent_state_would_be_moved_requests_wait_for_the_next_wave(engine, widths, monkeypatch):
    monkeypatch.setattr("heterorl.common.generation.hf_batch._is_made_of", lambda cache, *, sliding: False)
    requests = [request(key) for key in range(4)]
    for one in requests:
        engine.submit(one)
    finished = collected(engine)
    passes, widths[:] = list(widths), []
    monkeypatch.undo()

    assert {num for num, _ in passes} == {8}
    for key, members in enumerate(in_order(finished, requests)):
        assert_equal(members, alone(engine, key))


def test_a_request_larger_than_the_batch_is_computed_alone(engine, widths):
    large = Request(key=7, prompt=PROMPTS[0], seed=1, num_completions=12)
    for one in (request(0), large, request(1)):
        engine.submit(one)
    finished = collected(engine)

    assert len(finished) == NUM + 12 + NUM
    assert max(num for num, _ in widths) == 12


def test_cancel_gives_up_what_is_under_way_and_what_waits(engine):
    for key in range(4):
        engine.submit(request(key))
    assert engine.collect()
    engine.cancel()
    assert engine.collect() == []

    engine.submit(request(5))
    assert_equal(in_order(collected(engine), [request(5)])[0], alone(engine, 5))


def test_cancel_ends_a_collect_that_computes(engine):
    passes = []

    def note(module, args):
        passes.append(args)
        if len(passes) == 2:
            canceller = threading.Thread(target=engine.cancel)
            canceller.start()
            canceller.join()
            engine.submit(request(1))

    engine.model.register_forward_pre_hook(note)
    engine.submit(Request(key=0, prompt=PROMPTS[0], seed=1, num_completions=2))

    assert engine.collect() == []
    assert {one.key for one in collected(engine)} == {1}


def test_a_load_that_fails_half_way_gives_everything_up_until_one_succeeds(engine, monkeypatch):
    arenas = {version: disturbed(engine.base(), seed=version, scale=0.05) for version in range(2)}
    engine.load(arenas[0], 0)
    engine.submit(request(0))
    assert engine.collect()

    def half(arena, model):
        next(model.parameters()).data.zero_()
        raise torch.OutOfMemoryError("2 GiB")

    with monkeypatch.context() as patched:
        patched.setattr(tensors, "load", half)
        with pytest.raises(EngineError, match=r"out of memory: 2 GiB .*batch_rows"):
            engine.load(arenas[1], 1)
    assert engine.version == -1
    assert engine.base() is None
    with pytest.raises(EngineError, match="no whole version"):
        engine.collect()

    engine.load(arenas[1], 1)
    engine.submit(request(1))
    assert {span.version for one in collected(engine) for span in one.completion.spans} == {1}


def test_weights_change_under_what_joined(engine, model_dir):
    """Exactly: what the new weights draw from the keys and values of the old ones, as `Truth.mixed` recomputes it."""
    truth = Truth(model_dir)
    arenas = {version: disturbed(engine.base(), seed=version, scale=0.05) for version in range(6)}
    engine.load(arenas[0], 0)
    requests = [request(key) for key in range(8)]
    finished = []
    for number, one in enumerate(requests):
        engine.submit(one)
        finished += engine.collect()
        if number in (1, 2, 3, 5, 6):
            engine.load(arenas[engine.version + 1], engine.version + 1)
    finished += collected(engine)

    members = [(one, row) for one, group in zip(requests, in_order(finished, requests), strict=True) for row in group]
    assert max(len(row.spans) for _, row in members) > 2
    for one, row in members:
        np.testing.assert_allclose(row.logprobs, truth.mixed(arenas, one.prompt, row, SAMPLING), atol=1e-5)


CPU_FULL = (
    "[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: not enough memory: you tried to allocate 2 GiB"
)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("2 GiB"), MemoryError("2 GiB"), RuntimeError(CPU_FULL)], ids=repr
)
def test_a_device_without_memory_gives_everything_up(engine, monkeypatch, error):
    for key in range(3):
        engine.submit(request(key))
    assert engine.collect()
    with monkeypatch.context() as patched:
        patched.setattr(engine.model, "forward", lambda **_: (_ for _ in ()).throw(error))
        with pytest.raises(EngineError, match=r"out of memory: .*2 GiB .*batch_rows"):
            engine.collect()

    assert engine.collect() == []


def test_a_pass_that_fails_in_any_way_gives_everything_up(engine, monkeypatch):
    for key in range(3):
        engine.submit(request(key))
    assert engine.collect()
    with monkeypatch.context() as patched:
        patched.setattr(engine.model, "forward", lambda **_: (_ for _ in ()).throw(RuntimeError("CUDA error")))
        with pytest.raises(EngineError, match="the model failed: RuntimeError: CUDA error"):
            engine.collect()

    assert engine.collect() == []


def test_a_device_without_memory_for_the_canary_gives_nothing_up(engine, monkeypatch):
    text = ScoredText(prompt=PROMPTS[0], completion=np.array([5, 1], np.int32))
    engine.submit(request(0))
    first = engine.collect()
    with monkeypatch.context() as patched:
        patched.setattr(engine.model, "forward", lambda **_: (_ for _ in ()).throw(torch.OutOfMemoryError("2 GiB")))
        with pytest.raises(EngineError, match=r"out of memory: 2 GiB .*batch_rows"):
            engine.score([text])

    assert_equal(in_order([*first, *collected(engine)], [request(0)])[0], alone(engine, 0))


class Answers:
    """An engine whose `collect` answers as it is told."""

    def __init__(self, *answers):
        self.answers, self.num_cancels, self.keys = list(answers), 0, []

    def submit(self, request):
        if request.seed < 0:
            raise (ConfigError if request.seed < -1 else PromptTooLong)("engine.max_model_len", "no room")
        self.keys.append(request.key)

    def collect(self):
        return self.answers.pop(0)

    def cancel(self):
        self.num_cancels += 1


def test_a_batch_that_is_cancelled_is_given_up():
    engine = Answers([])

    with pytest.raises(EngineError, match="given up"):
        generate_all(engine, PROMPTS[:2], seeds=[1, 2], num_per_prompt=1)

    assert engine.num_cancels == 1


def test_a_batch_that_is_refused_leaves_nothing_under_way():
    engine = Answers()

    with pytest.raises(ConfigError, match="no room"):
        generate_all(engine, PROMPTS[:2], seeds=[1, -2], num_per_prompt=1)

    assert (engine.keys, engine.num_cancels) == ([0], 1)


def test_a_prompt_that_is_refused_is_left_out_of_its_batch(caplog):
    engine = Answers([Finished(key=1, member=0, completion="drawn")])

    assert generate_all(engine, PROMPTS[:3], seeds=[-1, 1, -1], num_per_prompt=1) == [[], ["drawn"], []]
    assert "prompt 0 of 3 is left out" in caplog.text


@pytest.mark.parametrize("size", [9, 10, 60])
def test_a_prompt_without_room_is_refused_and_others_go_on(model_dir, size):
    engine = hf_engine(model_dir, max_new_tokens=LIMIT, engine={"batch_rows": 8})
    room = engine.model.config.max_position_embeddings = LIMIT + 9
    engine._room = token_limits_of(engine.model.config)
    engine.submit(request(0))
    long = Request(key=1, prompt=np.full(size, 3, np.int32), seed=1, num_completions=1)
    if size == 9:
        engine.submit(long)
    else:
        with pytest.raises(
            PromptTooLong, match=f"model_dir: {room} tokens hold no prompt of {size} and {LIMIT} new ones"
        ):
            engine.submit(long)

    assert {one.key for one in collected(engine)} == ({0, 1} if size == 9 else {0})


@pytest.mark.parametrize("token", [-1, 10_000])
def test_a_token_that_the_model_lacks_is_refused(engine, token):
    with pytest.raises(PromptRefused, match=r"model_dir: the tokenizer writes token .*, and the model has \d+"):
        engine.submit(Request(key=1, prompt=np.array([3, token], np.int32), seed=1, num_completions=1))

    assert engine.collect() == []


def test_completions_that_leave_no_room_for_a_prompt_are_no_fault_of_the_prompt(engine):
    asked = Request(
        key=1, prompt=PROMPTS[0], seed=1, num_completions=1, sampling=semantics(max_new_tokens=4096)
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"max_new_tokens: 4096 new tokens leave no room for a prompt") as caught:
        engine.submit(asked)

    assert not isinstance(caught.value, PromptRefused)


def test_a_lost_request_is_no_finished_one(engine):
    engine.submit(request(3))
    ended = engine.collect()

    assert all(isinstance(one, Finished) and one.key == 3 for one in ended)
    assert all(one.completion.finish_reason in FinishReason for one in ended)


def test_requests_of_another_temperature_and_length_beside_others_are_what_they_are_alone(engine, model_dir):
    greedy = semantics(top_k=1, max_new_tokens=5)
    wild = semantics(temperature=2.0, top_p=0.8, max_new_tokens=60)
    ways = [None, greedy, wild, None]
    requests = [dataclasses.replace(request(key), sampling=ways[key], num_completions=2) for key in range(4)]
    for one in requests:
        engine.submit(one)
    found = in_order(collected(engine), requests)

    for one, members in zip(requests, found, strict=True):
        own = one.sampling or SAMPLING
        plain = hf_engine(
            model_dir, temperature=own.temperature, top_p=own.top_p, top_k=own.top_k,
            max_new_tokens=own.max_new_tokens, engine={"batch_rows": 8},
        )  # fmt: skip
        (expected,) = generate_all(plain, [one.prompt], seeds=[one.seed], num_per_prompt=2)
        assert [row.token_ids.tolist() for row in members] == [row.token_ids.tolist() for row in expected]
    assert len({tuple(row.token_ids.tolist()) for row in found[1]}) == 1
    assert max(row.token_ids.size for row in found[1]) <= 5
