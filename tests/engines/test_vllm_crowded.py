"""Memory for fewer requests than vLLM is given: the others wait in its own queue, also at a swap."""

import numpy as np
import pytest

from heterorl.common.generation.inference_engine import Request
from heterorl.common.types.rollout import Span
from tests.support.engines import PROMPTS, Truth, disturbed, semantics, vllm_engine, write_model

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow, pytest.mark.filterwarnings("default")]
ROWS, LIMIT = 64, 200
MEMORY = {"kv_cache_bytes": 256 << 10, "extra": {"block_size": 32}}
"""16 blocks of 32 tokens: 16 requests begin, two end at once."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        directory = tmp_path_factory.mktemp("engine")
        model_dir = write_model(directory / "model", family="Llama")
        settings = {"batch_rows": ROWS, "end_token_ids": (), **MEMORY}
        engine = vllm_engine(model_dir, directory / "weights", max_new_tokens=LIMIT, engine=settings)
        yield engine, engine.base(), Truth(model_dir)
        engine.close()


def submit_all(engine):
    for key in range(ROWS):
        engine.submit(Request(key=key, prompt=PROMPTS[key % len(PROMPTS)], seed=key, num_completions=1))


def collected(engine, ended=()):
    """The rows that ended, and all the others once they have."""
    ended = list(ended)
    while len(ended) < ROWS:
        ended += engine.collect()
    return ended


class Seen:
    """Tokens of each completion that vLLM drew, aborted ones too, and how many were whole at the end of each question."""

    def __init__(self):
        self.tokens, self.before_question = [], []


@pytest.fixture
def seen(made, monkeypatch):
    engine, seen = made[0]._alive()._engine, Seen()
    generate = engine.generate

    async def counted(prompt, parameters, **named):
        number = 0
        try:
            async for output in generate(prompt, parameters, **named):
                number += len(output.outputs[0].token_ids)
                yield output
        finally:
            if parameters.prompt_logprobs is None:
                seen.tokens.append(number)
            else:
                seen.before_question.append(seen.tokens.count(LIMIT))

    monkeypatch.setattr(engine, "generate", counted)
    return seen


def test_requests_without_a_token_begin_again_at_a_swap(made, seen):
    engine, base, truth = made
    engine.load(disturbed(base, seed=1), 1)
    submit_all(engine)
    first = engine.collect()
    assert len(first) < ROWS // 2
    state = disturbed(base, seed=2)
    engine.load(state, 2)
    ended = collected(engine, first)

    # At most a first token that was on its way.
    assert sum(seen.tokens) - ROWS * LIMIT <= ROWS
    whole = [one for one in ended if one.completion.spans == (Span(version=2, start=0, end=LIMIT),)]
    assert len(whole) >= ROWS // 2
    for one in whole:
        prompt = PROMPTS[one.key % len(PROMPTS)]
        expected = truth.logprobs(state, prompt, one.completion, semantics())
        assert np.abs(one.completion.logprobs - expected).max() < 1e-4


def test_a_swap_check_goes_first_and_completions_stay_in_order(made, seen):
    engine, base, _ = made
    engine.load(disturbed(base, seed=3), 3)
    seen.before_question.clear()
    submit_all(engine)
    first = engine.collect()
    engine.load(disturbed(base, seed=4), 4)

    assert max(seen.before_question) < ROWS // 2
    assert [one.key for one in collected(engine, first)] == list(range(ROWS))
