"""The reference engine: log-probs of the policy that drew, whatever else is in the batch."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from heterorl.common.errors import ConfigError
from heterorl.common.generation.hf_batch import _is_made_of
from heterorl.common.generation.hf_engine import FairLock, HfEngine
from heterorl.common.generation.inference_engine import generate_all
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.model.logprobs import draw, gumbel, truncated
from heterorl.common.model.tensors import store
from heterorl.common.text.prompter import Prompter
from heterorl.common.types.common import LogprobMode, SamplingSemantics
from heterorl.common.types.rollout import FinishReason, Span
from heterorl.common.weights.arena import Arena
from tests.support.engines import Truth, disturbed, passes_of


def semantics(**changes):
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 6, "logprob_mode": LogprobMode.PROCESSED}
    return SamplingSemantics(**{**values, **changes})


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=0, hidden_size=32, num_layers=2)


def engine_of(model_dir, **changes):
    sampling = semantics(**changes)
    return HfEngine(
        model_dir=str(model_dir), published_dtype="fp32", compute_dtype="fp32", device="cpu", sampling=sampling,
        batch_rows=8, end_token_ids=(1,),
    )  # fmt: skip


PROMPTS = [np.array(ids, np.int32) for ids in ([2, 3, 12, 4], [5], [6, 7, 8, 9, 10, 12, 2], [3, 3])]


def test_engine_whose_draws_are_no_numbers_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path, seed=0, hidden_size=32, num_layers=1))
    model.model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="engine.kind: .* draws with other log-probs"):
        engine_of(tmp_path)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.6}, {"temperature": 0.6, "logprob_mode": LogprobMode.RAW}])
def test_logprobs_equal_a_full_float32_forward(model_dir, changes):
    engine = engine_of(model_dir, **changes)

    for ids, rows in zip(PROMPTS, generate_all(engine, PROMPTS, seeds=[1, 2, 3, 4], num_per_prompt=3), strict=True):
        for row in rows:
            whole = torch.tensor([[*ids.tolist(), *row.token_ids.tolist()]])
            with torch.no_grad():
                logits = engine.model(input_ids=whole).logits[0, ids.size - 1 : -1]
            if changes.get("logprob_mode") is not LogprobMode.RAW:
                logits = logits / changes.get("temperature", 1.0)
            expected = logits.log_softmax(-1).gather(1, whole[0, ids.size :, None])[:, 0].numpy()
            assert row.logprobs.dtype == np.float32
            np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)


def test_result_of_a_prompt_depends_on_its_seed_and_not_on_its_neighbours(model_dir):
    engine = engine_of(model_dir)
    together = generate_all(engine, PROMPTS, seeds=[1, 2, 3, 4], num_per_prompt=2)
    alone = [
        generate_all(engine, [ids], seeds=[seed], num_per_prompt=2)[0]
        for ids, seed in zip(PROMPTS, (1, 2, 3, 4), strict=True)
    ]
    other = generate_all(engine, PROMPTS, seeds=[5, 6, 7, 8], num_per_prompt=2)

    def ids(groups):
        return [[row.token_ids.tolist() for row in rows] for rows in groups]

    assert ids(together) == ids(alone)
    assert ids(together) != ids(other)


def drawn_without_cache(engine, ids, seed, num_rows, limit):
    """Slow reference: one row at a time, the whole sequence at every step, no cache and no batch."""
    generator = torch.Generator().manual_seed(seed)
    noise = [gumbel((num_rows, engine.vocab_size), generator) for _ in range(limit)]
    result = []
    for row in range(num_rows):
        tokens = []
        while len(tokens) < limit and tokens[-1:] != [1]:
            whole = torch.tensor([[*ids.tolist(), *tokens]])
            with torch.no_grad():
                logits = engine.model(input_ids=whole).logits[:, -1]
            tokens.append(int((logits + noise[len(tokens)][row]).argmax()))
        result.append(tokens)
    return result


def test_rows_that_ended_leave_the_batch_and_change_nothing(model_dir):
    limit, seeds = 40, [1, 2, 3, 4]
    engine = engine_of(model_dir, max_new_tokens=limit)
    passes = passes_of(engine, "input_ids")
    drawn = [
        generate_all(engine, PROMPTS[i : i + 2], seeds=seeds[i : i + 2], num_per_prompt=4)
        for i in range(0, len(PROMPTS), 2)
    ]
    assert passes[0][0] == 8
    assert min(rows for rows, _ in passes) <= 2

    expected = [drawn_without_cache(engine, ids, seed, 4, limit) for ids, seed in zip(PROMPTS, seeds, strict=True)]
    assert [[row.token_ids.tolist() for row in rows] for part in drawn for rows in part] == expected


def test_rows_stay_in_a_cache_that_is_more_than_keys_and_values():
    layers = [DynamicLayer(), DynamicLayer()]
    window = DynamicSlidingWindowLayer(sliding_window=4)

    def cache_of(*layers, kind=DynamicCache):
        cache = kind()
        cache.layers = list(layers)
        return cache

    class OwnCache(DynamicCache):
        """As MiniMax's: a recurrent state next to the layers."""

    assert _is_made_of(cache_of(*layers), sliding=False)
    assert _is_made_of(cache_of(*layers, window), sliding=True)
    # A window keeps the last columns only: rows of another width do not fit there.
    assert not _is_made_of(cache_of(*layers, window), sliding=False)
    assert not _is_made_of(cache_of(*layers, LinearAttentionLayer()), sliding=True)
    assert not _is_made_of(cache_of(*layers, kind=OwnCache), sliding=True)
    assert not _is_made_of(object(), sliding=True)


def test_completions_end_with_the_end_token_or_at_the_limit_and_carry_their_version(model_dir):
    engine = engine_of(model_dir)
    assert engine.version == -1
    arena = Arena(engine.layout)
    store(engine.model, arena)
    engine.load(arena, 7)
    rows = [row for rows in generate_all(engine, PROMPTS * 8, seeds=range(32), num_per_prompt=4) for row in rows]

    ended = [row for row in rows if row.finish_reason is FinishReason.EOS]
    assert 0 < len(ended) < len(rows)
    assert all(row.token_ids[-1] == 1 and (row.token_ids[:-1] != 1).all() for row in ended)
    assert all(len(row.token_ids) == 6 for row in rows if row.finish_reason is FinishReason.LENGTH)
    assert all(row.spans == (Span(version=7, start=0, end=len(row.token_ids)),) for row in rows)
    assert all((row.logprobs <= 0).all() and len(row.logprobs) == len(row.token_ids) for row in rows)


def test_loaded_weights_are_the_ones_that_generate(model_dir):
    # T9: nothing computed with the old weights serves the new ones.
    engine = engine_of(model_dir)
    before = generate_all(engine, PROMPTS, seeds=[1] * 4, num_per_prompt=2)
    arena = Arena(engine.layout)
    store(engine.model, arena)
    for spec in arena.layout.specs:
        if not spec.alias_of and "norm" not in spec.name:
            arena.view(spec.name).view(np.float32)[...] *= 0.5
    engine.load(arena, 1)
    fresh = engine_of(model_dir)
    fresh.load(arena, 1)

    after = generate_all(engine, PROMPTS, seeds=[1] * 4, num_per_prompt=2)
    expected = generate_all(fresh, PROMPTS, seeds=[1] * 4, num_per_prompt=2)

    assert [[r.logprobs.tolist() for r in g] for g in after] == [[r.logprobs.tolist() for r in g] for g in expected]
    assert [[r.logprobs.tolist() for r in g] for g in after] != [[r.logprobs.tolist() for r in g] for g in before]


def test_draws_follow_the_softmax():
    logits = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4])).repeat(20_000, 1)
    tokens, logprobs = draw(logits, gumbel((20_000, 4), torch.Generator().manual_seed(0)), semantics())

    shares = torch.bincount(tokens, minlength=4) / 20_000
    # 5 standard errors of a share of 0.4 in 20000 draws: 0.0173
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.0173, rtol=0)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 0.2, 0.3, 0.4])[tokens])


def test_truncation_limits_the_draw_and_not_the_logprob():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))

    assert torch.isfinite(truncated(logits, semantics(top_k=2))).tolist() == [[True, True, False, False]]
    assert torch.isfinite(truncated(logits, semantics(top_p=0.7))).tolist() == [[True, True, False, False]]
    assert torch.isfinite(truncated(logits, semantics(top_p=0.01))).tolist() == [[True, False, False, False]]
    tokens, logprobs = draw(logits, torch.zeros(1, 4), semantics(top_k=1))
    assert tokens.tolist() == [0]
    assert logprobs.exp().item() == pytest.approx(0.5)


def test_noise_is_finite_for_any_draw():
    noise = gumbel((1000, 50), torch.Generator().manual_seed(0))

    assert torch.isfinite(noise).all()


def test_missing_model_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="model_dir"):
        engine_of(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer"):
        Prompter(str(tmp_path), use_chat_template=False)


def test_prompter_is_lossless_and_needs_a_template_to_use_one(model_dir):
    prompter = Prompter(str(model_dir), use_chat_template=False)

    assert prompter.decode(prompter.encode("12+34=640")) == "12+34=640"
    assert prompter.eos_token_id == 1
    with pytest.raises(ConfigError, match="chat template"):
        Prompter(str(model_dir), use_chat_template=True)


def test_base_is_the_weights_of_the_model_directory_until_others_are_loaded(model_dir):
    engine = engine_of(model_dir)
    base = engine.base()
    assert base is not None
    root = base.state_root()
    assert engine_of(model_dir).base().state_root() == root

    engine.load(base, version=0)

    assert engine.base() is None


def test_swap_takes_effect_between_two_tokens_and_the_cache_stays(model_dir):
    """Exactly: what the new weights draw from the keys and values of the old ones, as `Truth.mixed` recomputes it."""
    engine, truth, sampling = engine_of(model_dir, max_new_tokens=24), Truth(model_dir), semantics(max_new_tokens=24)
    arenas = {version: disturbed(engine.base(), seed=version) for version in range(3)}
    engine.load(arenas[0], 0)
    passes = []

    def note(module, args):
        passes.append(args)
        if len(passes) in (4, 9):
            # From another thread, that must wait for the pass under way.
            version = 1 if len(passes) == 4 else 2
            loaders.append(threading.Thread(target=engine.load, args=(arenas[version], version)))
            loaders[-1].start()
            while not engine._weights_lock._next.locked():
                pass

    loaders = []
    engine.model.register_forward_pre_hook(note)
    groups = generate_all(engine, PROMPTS[:1], seeds=[1], num_per_prompt=8)
    for loader in loaders:
        loader.join()

    rows = [row for rows in groups for row in rows]
    assert any([span.version for span in row.spans] == [0, 1, 2] for row in rows)
    assert all(span.end == 4 for row in rows for span in row.spans[:1] if len(row.spans) > 1)
    for row in rows:
        np.testing.assert_allclose(row.logprobs, truth.mixed(arenas, PROMPTS[0], row, sampling), atol=1e-5)


def test_token_carries_the_version_of_its_own_pass(model_dir):
    engine = engine_of(model_dir)

    class SwapAfterEveryTurn:
        @contextmanager
        def held(self):
            yield
            engine.version += 1

    engine._weights_lock, engine.version = SwapAfterEveryTurn(), 0
    [[row]] = generate_all(engine, PROMPTS[:1], seeds=[1], num_per_prompt=1)

    assert row.spans == tuple(Span(version=at, start=at, end=at + 1) for at in range(len(row.token_ids)))


def test_loop_lets_go_of_the_fair_lock_between_two_passes():
    lock, order = FairLock(), []

    def other():
        with lock.held():
            order.append("other")

    with lock.held():
        waiting = threading.Thread(target=other)
        waiting.start()
        while not lock._next.locked():
            pass
    for _ in range(3):
        with lock.held():
            order.append("loop")
    waiting.join()

    assert order == ["other", "loop", "loop", "loop"]
