"""Keys and values of ended turns: a later turn begins with them, and its log-probs stay those of a whole forward."""

import numpy as np
import pytest
import torch

from heterorl.common.errors import EngineError
from heterorl.common.generation import hf_batch
from heterorl.common.generation.inference_engine import Request, in_order
from tests.support.engines import PROMPTS, Truth, disturbed, hf_engine, passes_of, semantics, write_model

LIMIT, NUM = 10, 3
SAMPLING = semantics(max_new_tokens=LIMIT)
GIVEN = np.array([5, 8, 2], np.int32)
"""What an environment answers."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model_dir):
    return hf_engine(model_dir, max_new_tokens=LIMIT, engine={"batch_rows": 8})


@pytest.fixture
def read(engine):
    return passes_of(engine, "input_ids")


def first(key, *, num=NUM, **changes):
    values = {"prompt": PROMPTS[key % len(PROMPTS)], "seed": key, "num_completions": num, "may_continue": True}
    return Request(key=key, **{**values, **changes})


def following(request, member, completion, *, key, given=GIVEN):
    """The request of the turn behind a completion."""
    prompt = np.concatenate([request.prompt, completion.token_ids, given])
    return Request(key=key, prompt=prompt, seed=request.seed, num_completions=1, first_member=member, may_continue=True)


def drawn(engine, requests):
    for request in requests:
        engine.submit(request)
    finished = []
    while ended := engine.collect():
        finished += ended
    return in_order(finished, requests)


def assert_true(truth, arena, requests, rows):
    """The stated log-probs are those of a forward without cache or batch."""
    for request, members in zip(requests, rows, strict=True):
        for one in members:
            expected = truth.logprobs(arena, request.prompt, one, SAMPLING)
            np.testing.assert_allclose(one.logprobs, expected, atol=2e-5)


def next_turns(requests, rows, *, first_key, lengths=(GIVEN.size,)):
    """The turns behind all completions; the environment gives so many tokens, in turn."""
    behind = [
        (request, request.first_member + place, one)
        for request, members in zip(requests, rows, strict=True)
        for place, one in enumerate(members)
    ]
    return [
        following(request, member, one, key=first_key + number, given=np.resize(GIVEN, lengths[number % len(lengths)]))
        for number, (request, member, one) in enumerate(behind)
    ]


def test_turns_read_only_what_came_since_and_state_the_log_probs_of_a_whole_forward(engine, read, model_dir):
    arena, truth = engine.base(), Truth(model_dir)
    requests = [first(key) for key in range(4)]
    for turn in range(3):
        read.clear()
        rows = drawn(engine, requests)
        if turn:
            new = {columns for _, columns in read if columns > 1}
            assert new == {GIVEN.size + 1}, "the last drawn token and what was given"
        assert_true(truth, arena, requests, rows)
        requests = next_turns(requests, rows, first_key=100 * (turn + 1))


def test_turns_of_a_model_that_measures_distance_by_column(tmp_path):
    """GPT-Neo's local attention counts columns: padding between kept and new ones would move them apart."""
    settings = {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 5}
    model_dir = write_model(tmp_path, family="GPTNeo", **settings)
    engine = hf_engine(model_dir, max_new_tokens=LIMIT, engine={"batch_rows": 12})
    arena, truth = engine.base(), Truth(model_dir)
    requests = [first(key) for key in range(4)]
    for turn in range(3):
        rows = drawn(engine, requests)
        assert_true(truth, arena, requests, rows)
        requests = next_turns(requests, rows, first_key=100 * (turn + 1), lengths=(1, 9, 3, 14))


def test_rows_that_get_many_and_few_tokens_are_as_wide_as_the_longest_text(engine, read):
    requests = [first(key, num=1) for key in range(2)]
    masks = passes_of(engine, "attention_mask")
    turns = next_turns(requests, drawn(engine, requests), first_key=10, lengths=(60, 1))
    longest = max(turn.prompt.size for turn in turns)
    masks.clear()
    read.clear()

    drawn(engine, turns)

    assert masks[0] == (2, longest)
    assert read[0] == (2, 61)


def test_members_of_one_request_may_begin_with_one_turn(engine, read, model_dir):
    request = first(0)
    (members,) = drawn(engine, [request])
    again = [following(request, 0, members[0], key=1), following(request, 1, members[1], key=2)]
    again[0] = Request(key=1, prompt=again[0].prompt, seed=4, num_completions=NUM)
    read.clear()

    rows = drawn(engine, again)

    assert read[0] == (NUM + 1, GIVEN.size + 1)
    assert_true(Truth(model_dir), engine.base(), again, rows)


def test_prompt_that_is_all_there_is_read_again(engine, read):
    """A pass needs a token to read."""
    request = first(0, num=1, sampling=semantics(max_new_tokens=1))
    drawn(engine, [request])
    read.clear()
    drawn(engine, [first(0, num=1)])
    assert read[0] == (1, PROMPTS[0].size)


def test_longest_turn_is_taken(engine, read):
    request = first(0, num=1, sampling=semantics(max_new_tokens=1))
    ((one,),) = drawn(engine, [request])
    ((other,),) = drawn(engine, [first(0, num=1, seed=7, prompt=np.append(request.prompt, one.token_ids))])
    assert len(engine.kept_turns) == 1, "the second request took the first turn"
    drawn(engine, [request])
    read.clear()
    drawn(engine, [Request(key=3, seed=1, num_completions=1,
                           prompt=np.concatenate([request.prompt, one.token_ids, other.token_ids, GIVEN]))])  # fmt: skip
    assert read[0] == (1, GIVEN.size + 1)


def test_turns_join_rows_under_way_and_whole_prompts(engine, read, model_dir):
    begun = [first(0), first(1)]
    rows = drawn(engine, begun)
    arena, truth = engine.base(), Truth(model_dir)
    turns = [following(begun[n], m, rows[n][m], key=10 + NUM * n + m) for n in range(2) for m in range(NUM)]
    mixed = [first(2, num=1), *turns[:2], first(3, num=2), *turns[2:]]
    read.clear()

    assert_true(truth, arena, mixed, drawn(engine, mixed))
    assert (5, GIVEN.size + 1) in read
    assert (3, max(PROMPTS[2].size, PROMPTS[3].size)) in read


def test_no_turn_begins_with_keys_and_values_of_another_version(engine, read, model_dir):
    one, other = engine.base(), disturbed(engine.base(), seed=1)
    engine.load(one, 0)
    request = first(0)
    (members,) = drawn(engine, [request])
    turn = following(request, 0, members[0], key=1)
    engine.load(other, 1)
    read.clear()

    (again,) = drawn(engine, [turn])

    assert read[0] == (1, turn.prompt.size)
    expected = Truth(model_dir).logprobs(other, turn.prompt, again[0], SAMPLING)
    np.testing.assert_allclose(again[0].logprobs, expected, atol=2e-5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_change_around_a_pass_are_noticed(engine, read, model_dir, when):
    """Before: between the choice of the rows and their pass. After: between a pass and the keeping of its turns."""
    one, other = engine.base(), disturbed(engine.base(), seed=1)
    engine.load(one, 0)
    # One token, so that its keys and values are those of one version.
    request, run = first(0, num=1, sampling=semantics(max_new_tokens=1)), engine.run

    def swapped(inputs):
        if when == "before":
            engine.load(other, 1)
        result = run(inputs)
        if when == "after":
            engine.load(other, 1)
        return result

    if when == "after":
        engine.run = swapped
    (members,) = drawn(engine, [request])
    turn = following(request, 0, members[0], key=1)
    engine.run = swapped if when == "before" else run
    read.clear()

    (again,) = drawn(engine, [turn])

    assert read[0] == (1, turn.prompt.size)
    expected = Truth(model_dir).logprobs(other, turn.prompt, again[0], SAMPLING)
    np.testing.assert_allclose(again[0].logprobs, expected, atol=2e-5)


def test_completion_that_other_weights_read_in_part_is_not_kept(engine):
    """Also when they have the same number."""
    one, other = engine.base(), disturbed(engine.base(), seed=1)
    engine.load(one, 0)
    engine.model.register_forward_pre_hook(lambda module, args: seen.append(1))
    seen, run = [], engine.run

    def swapped(inputs):
        if len(seen) == 1:
            engine.load(other, 0)
        return run(inputs)

    engine.run = swapped
    (members,) = drawn(engine, [first(0)])

    assert all(member.token_ids.size > 1 for member in members)
    assert len(engine.kept_turns) == 0


def test_only_turns_that_may_continue_are_kept_and_each_is_used_once(engine, read):
    drawn(engine, [first(0, may_continue=False)])
    assert not len(engine.kept_turns)
    request = first(1)
    (members,) = drawn(engine, [request])
    assert len(engine.kept_turns) == NUM

    turn = following(request, 0, members[0], key=5)
    for _ in range(2):
        read.clear()
        drawn(engine, [Request(key=5, prompt=turn.prompt, seed=3, num_completions=1)])
        # The second time the turn is gone.
        assert len(engine.kept_turns) == NUM - 1
    assert read[0] == (1, turn.prompt.size)


def test_kept_turns_are_bounded_and_the_oldest_leave_first(monkeypatch):
    monkeypatch.setattr(hf_batch, "KEPT_BYTES", 25)
    for most, left in ((8, [1, 2]), (1, [2]), (0, [])):
        store = hf_batch.KeptTurns(most)
        for ids in PROMPTS[:3]:
            store.keep(ids, hf_batch.KeptTurn(size=ids.size, layers=(), num_bytes=10))
        assert [number for number in range(3) if store.has(np.append(PROMPTS[number], GIVEN))] == left
        assert len(store) == len(left)
        for ids in PROMPTS[:3]:
            store.take(np.append(ids, GIVEN))
        assert len(store) == 0
        store.keep(PROMPTS[0], hf_batch.KeptTurn(size=4, layers=(), num_bytes=25))
        assert len(store) == min(most, 1), "its bytes are free again"


def test_turn_that_is_kept_again_counts_once(monkeypatch):
    monkeypatch.setattr(hf_batch, "KEPT_BYTES", 10)
    store = hf_batch.KeptTurns(8)
    for _ in range(3):
        store.keep(PROMPTS[0], hf_batch.KeptTurn(size=PROMPTS[0].size, layers=(), num_bytes=10))
    assert len(store) == 1


def test_engine_that_ran_out_of_memory_keeps_none_from_then_on(engine, monkeypatch):
    request = first(0)
    (members,) = drawn(engine, [request])
    assert len(engine.kept_turns) == NUM
    with monkeypatch.context() as patches:
        patches.setattr(engine, "model", lambda **inputs: torch.empty(1 << 60))
        with pytest.raises(EngineError, match="out of memory"):
            drawn(engine, [following(request, 0, members[0], key=1)])
    assert len(engine.kept_turns) == 0
    engine.load(engine.base(), 1)
    drawn(engine, [request])
    assert len(engine.kept_turns) == 0


def test_engine_that_failed_otherwise_keeps_turns_again(engine, monkeypatch):
    request = first(0)
    with monkeypatch.context() as patches:
        patches.setattr(engine, "model", lambda **inputs: 1 / 0)
        with pytest.raises(EngineError, match="the model failed"):
            drawn(engine, [request])
    drawn(engine, [request])
    assert len(engine.kept_turns) == NUM


def test_model_whose_layers_keep_a_window_only_keeps_no_turns(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    model_dir = write_model(tmp_path, **window)
    engine = hf_engine(model_dir, max_new_tokens=LIMIT, engine={"batch_rows": 8})
    requests = [first(key) for key in range(2)]
    rows = drawn(engine, requests)
    assert len(engine.kept_turns) == 0
    turns = next_turns(requests, rows, first_key=10)
    assert_true(Truth(model_dir), engine.base(), turns, drawn(engine, turns))
