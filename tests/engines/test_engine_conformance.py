"""Every engine keeps the Engine Protocol's promises: one suite, run against each that is installed."""

import threading
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest

from heterorl.common.generation.inference_engine import Finished, Request, generate_all, in_order
from heterorl.common.types.rollout import FinishReason, Span
from heterorl.common.weights.arena import Arena
from tests.support.engines import EOS, PROMPTS, Truth, disturbed, hf_engine, semantics, vllm_engine, write_model

pytestmark = [pytest.mark.timeout(1500), pytest.mark.filterwarnings("default")]
NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make test-engines")
TEMPERATURE = 0.8
SAMPLING = semantics(temperature=TEMPERATURE)
SEEDS = [11, 12, 13, 14]
OTHER_END = 7
"""As models have that end a turn and a text by different tokens."""
ENGINE = {"end_token_ids": (EOS, OTHER_END)}


class Subject:
    """An engine, what it started from, and versions that only grow: tests come in any order."""

    def __init__(self, engine, base: Arena, truth: Truth) -> None:
        self.engine, self.base, self.truth, self.version = engine, base, truth, -1

    def load(self, arena: Arena) -> int:
        self.version += 1
        self.engine.load(arena, self.version)
        return self.version

    def generate(self, *, seeds=SEEDS, prompts=PROMPTS, num_per_prompt=3):
        return generate_all(self.engine, prompts, seeds=seeds, num_per_prompt=num_per_prompt)


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=NEEDS_VLLM)])
def subject(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as environment:
        # Several processes share the test machine's cores: none may claim one of its own.
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        directory = tmp_path_factory.mktemp("engine")
        model_dir = write_model(directory / "model")
        if request.param == "hf":
            engine = hf_engine(model_dir, temperature=TEMPERATURE, engine=ENGINE)
        else:
            engine = vllm_engine(model_dir, directory / "weights", temperature=TEMPERATURE, engine=ENGINE)
        base = engine.base()
        assert base is not None
        yield Subject(engine, base, Truth(model_dir))
        engine.close()


def tokens(groups):
    return [[row.token_ids.tolist() for row in rows] for rows in groups]


def test_logprobs_equal_a_float32_forward(subject):
    subject.load(subject.base)

    groups = subject.generate()

    assert all(row.logprobs.dtype == np.float32 and (row.logprobs <= 0).all() for rows in groups for row in rows)
    assert subject.truth.difference(subject.base, groups, SAMPLING) < 1e-5


def test_equal_seeds_draw_equal_tokens_whatever_else_is_in_the_batch(subject):
    subject.load(subject.base)

    together = tokens(subject.generate())
    alone = [
        tokens(subject.generate(prompts=[prompt], seeds=[seed]))[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]

    assert together == alone
    assert together != tokens(subject.generate(seeds=[21, 22, 23, 24]))
    assert all(len({tuple(ids) for ids in rows}) > 1 for rows in together)


def test_completions_end_with_an_end_token_or_at_the_limit(subject):
    subject.load(subject.base)

    rows = [row for rows in subject.generate(num_per_prompt=24) for row in rows]

    ended = [row for row in rows if row.finish_reason is FinishReason.EOS]
    assert 0 < len(ended) < len(rows)
    # Each of them ends completions, which keep it with its log-prob.
    assert {int(row.token_ids[-1]) for row in ended} == {EOS, OTHER_END}
    assert not any(np.isin(row.token_ids[:-1], (EOS, OTHER_END)).any() for row in ended)
    cut = [row for row in rows if row.finish_reason is FinishReason.LENGTH]
    assert all(
        len(row.token_ids) == SAMPLING.max_new_tokens and not np.isin(row.token_ids, (EOS, OTHER_END)).any()
        for row in cut
    )
    assert all(row.token_ids.dtype == np.int32 and len(row.logprobs) == len(row.token_ids) for row in rows)


def test_draws_follow_the_policy(subject):
    subject.load(subject.base)
    num = 600

    rows = subject.generate(prompts=PROMPTS[:1], seeds=[5], num_per_prompt=num)[0]

    first = np.array([row.token_ids[0] for row in rows])
    probability = {int(row.token_ids[0]): float(np.exp(row.logprobs[0])) for row in rows}
    for token, share in probability.items():
        # 5 standard errors of the share of a token in `num` draws
        assert abs((first == token).mean() - share) <= 5 * (share * (1 - share) / num) ** 0.5 + 1e-6
    # what was never drawn is rare: 0.97^600 is 1e-8
    assert sum(probability.values()) > 0.9


def test_twenty_swaps_each_generate_with_their_own_version(subject):
    state, seen = subject.base, []
    for step in range(20):
        # Small steps, as a learner makes them: a state that is one version old must show.
        state = disturbed(state, seed=step, scale=0.02)
        version = subject.load(state)

        groups = subject.generate(num_per_prompt=2)

        assert subject.truth.difference(state, groups, SAMPLING) < 1e-5
        rows = [row for rows in groups for row in rows]
        assert all(row.spans == (Span(version=version, start=0, end=len(row.token_ids)),) for row in rows)
        seen.append([row.logprobs.tolist() for row in rows])
    assert all(one != other for one, other in pairwise(seen))
    previous = disturbed(subject.base, seed=0, scale=0.02)
    assert subject.truth.difference(previous, groups, SAMPLING) > 1e-3


def test_weights_are_free_to_change_after_a_swap(subject):
    state = disturbed(subject.base, seed=3)
    subject.load(state)
    before = subject.generate()
    for index in range(state.num_chunks):
        state.chunk(index)[:] = 0

    assert tokens(subject.generate()) == tokens(before)


def generated_over_swaps(subject, prompts, *, num_per_prompt):
    """Completions of one `generate` with swaps, as many as fit in, from another thread; and the weights by version."""
    arenas = {subject.load(subject.base): subject.base}
    groups = []
    batch = threading.Thread(
        target=lambda: groups.extend(
            subject.generate(prompts=prompts, seeds=SEEDS[: len(prompts)], num_per_prompt=num_per_prompt)
        )
    )
    batch.start()
    state = subject.base
    while batch.is_alive() and len(arenas) < 200:
        state = disturbed(state, seed=len(arenas), scale=0.02)
        arenas[subject.load(state)] = state
    batch.join()
    return arenas, groups


@pytest.mark.slow
def test_swaps_in_flight_stamp_every_token_with_the_weights_that_drew_it(subject):
    # Longer than a block of vLLM's cache: what begins after a swap must not begin with the keys and values before it.
    prompts = [PROMPTS[0], np.arange(140, dtype=np.int32) % 16 + 2]

    arenas, groups = generated_over_swaps(subject, prompts, num_per_prompt=96)

    rows = [(prompt, row) for prompt, rows in zip(prompts, groups, strict=True) for row in rows]
    mixed = [(prompt, row) for prompt, row in rows if len(row.spans) > 1]
    assert mixed
    assert len({span.version for _, row in rows for span in row.spans}) > 2
    assert (
        max(np.abs(row.logprobs - subject.truth.mixed(arenas, prompt, row, SAMPLING)).max() for prompt, row in rows)
        < 1e-5
    )
    # Weights of one version throughout are another policy; keys and values of one version a slightly other one.
    fresh = [
        np.abs(row.logprobs - subject.truth.logprobs(arenas[row.spans[-1].version], prompt, row, SAMPLING))
        for prompt, row in mixed
    ]
    after = [differences[row.spans[-1].start :] for differences, (_, row) in zip(fresh, mixed, strict=True)]
    assert max(differences.max() for differences in fresh) > 1e-3
    assert max(differences.max() for differences in after) > 1e-4


def request(key, *, num=3):
    return Request(key=key, prompt=PROMPTS[key % len(PROMPTS)], seed=500 + key, num_completions=num)


def drained(engine):
    finished = []
    while ended := engine.collect():
        finished += ended
    return finished


def test_requests_submitted_while_others_are_under_way_give_what_they_give_alone(subject):
    subject.load(subject.base)
    requests, finished = [request(key) for key in range(16)], []
    waiting = iter(requests)
    # As many as fit, and another one whenever something ended.
    for one in (next(waiting) for _ in range(subject.engine.max_running // 3)):
        subject.engine.submit(one)
    while ended := subject.engine.collect():
        assert all(isinstance(one, Finished) for one in ended)
        finished += ended
        if (one := next(waiting, None)) is not None:
            subject.engine.submit(one)

    assert len(finished) == 48
    for one, rows in zip(requests, in_order(finished, requests), strict=True):
        alone = subject.generate(prompts=[one.prompt], seeds=[one.seed])
        assert tokens([rows]) == tokens(alone)
        differences = [np.abs(a.logprobs - b.logprobs).max() for a, b in zip(rows, alone[0], strict=True)]
        assert max(differences) < 1e-5


def test_members_of_one_seed_have_draws_of_their_own(subject):
    subject.load(subject.base)

    def drawn(member):
        subject.engine.submit(Request(key=1, prompt=PROMPTS[0], seed=9, num_completions=1, first_member=member))
        (one,) = drained(subject.engine)
        return one.completion.token_ids.tolist()

    rows = [drawn(member) for member in range(4)]

    assert len({tuple(ids) for ids in rows}) > 1
    assert [drawn(member) for member in range(4)] == rows


def test_cancel_under_way_wakes_collect_and_leaves_a_clean_engine(subject):
    subject.load(subject.base)
    seen = []

    def collect():
        seen.extend(drained(subject.engine))
        seen.append("end")

    for key in range(8):
        subject.engine.submit(request(key, num=12))
    collector = threading.Thread(target=collect)
    collector.start()
    subject.engine.cancel()
    collector.join()

    assert seen[-1] == "end"
    assert len(seen) < 96
    assert subject.engine.collect() == []
    subject.engine.submit(request(3))
    (rows,) = in_order(drained(subject.engine), [request(3)])
    assert tokens([rows]) == tokens(subject.generate(prompts=[request(3).prompt], seeds=[request(3).seed]))


@pytest.mark.slow
def test_loads_while_requests_come_and_go_stamp_every_token(subject):
    arenas = {subject.load(subject.base): subject.base}
    requests = [request(key, num=8) for key in range(24)]
    finished, waiting, is_over = [], iter(requests), threading.Event()

    def loop():
        for one in (next(waiting) for _ in range(4)):
            subject.engine.submit(one)
        while ended := subject.engine.collect():
            finished.extend(ended)
            if (one := next(waiting, None)) is not None:
                subject.engine.submit(one)
        is_over.set()

    thread = threading.Thread(target=loop)
    thread.start()
    state = subject.base
    while not is_over.is_set() and len(arenas) < 60:
        state = disturbed(state, seed=len(arenas), scale=0.02)
        arenas[subject.load(state)] = state
    thread.join()

    rows = [
        (one.prompt, row)
        for one, members in zip(requests, in_order(finished, requests), strict=True)
        for row in members
    ]
    assert len({span.version for _, row in rows for span in row.spans}) > 2
    assert any(len(row.spans) > 1 for _, row in rows)
    assert (
        max(np.abs(row.logprobs - subject.truth.mixed(arenas, prompt, row, SAMPLING)).max() for prompt, row in rows)
        < 1e-5
    )
