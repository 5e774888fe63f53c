"""Draws that their names decide: the same for every batch and machine, another for every other name."""

import numpy as np
import pytest
import torch

from heterorl.common.errors import ConfigError
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import Request, generate_all
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.model.logprobs import group_key, gumbel_noise, turn_seed
from heterorl.common.process.config_file import load
from heterorl.common.types.common import LogprobMode, SamplingSemantics
from heterorl.sampler.sampler_config import SamplerConfig

SAMPLING = SamplingSemantics(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=6, logprob_mode=LogprobMode.PROCESSED)
PROMPTS = [np.array(ids, np.int32) for ids in ([2, 3, 12, 4], [5], [6, 7, 8, 9, 10, 12, 2])]
KEY = group_key(seed=7, prompt_index=3)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    model_dir = write_tiny_model(tmp_path_factory.mktemp("model"), seed=0, hidden_size=32, num_layers=1)
    return HfEngine(
        model_dir=str(model_dir), published_dtype="fp32", compute_dtype="fp32", device="cpu", sampling=SAMPLING,
        batch_rows=8, end_token_ids=(1,), is_seeded=True,
    )  # fmt: skip


def tokens(rows):
    return [row.token_ids.tolist() for row in rows]


def test_noise_is_the_published_one():
    # A change of these bits is a change of the protocol: sites and learners of two versions would not agree.
    assert KEY == 0xDB5AE1636022240F1D928DA00C3DEF
    noise = gumbel_noise(KEY, sample=1, position=2, vocab_size=3)
    assert noise.dtype == np.float32
    np.testing.assert_allclose(noise, [-1.2386054, -0.6697045, -0.04443935], rtol=1e-6)


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(KEY, sample=0, position=0, vocab_size=200_000)

    # Mean is Euler's constant, standard deviation pi / sqrt(6); 5 standard errors of 200,000 draws.
    assert noise.mean() == pytest.approx(0.5772, abs=0.015)
    assert noise.std() == pytest.approx(1.2825, abs=0.015)
    assert np.isfinite(noise).all()


@pytest.mark.parametrize(
    "other",
    [
        {"key": group_key(seed=8, prompt_index=3)},
        {"key": group_key(seed=7, prompt_index=4)},
        {"sample": 1},
        {"position": 1},
    ],
)
def test_every_part_of_the_name_matters(other):
    name = {"key": KEY, "sample": 0, "position": 0}
    mine = gumbel_noise(**name, vocab_size=64)
    theirs = gumbel_noise(**{**name, **other}, vocab_size=64)

    assert not np.isclose(mine, theirs).any()


def test_longer_noise_begins_with_the_shorter():
    whole = gumbel_noise(KEY, sample=0, position=0, vocab_size=9)

    np.testing.assert_array_equal(whole[:4], gumbel_noise(KEY, sample=0, position=0, vocab_size=4))


def test_draws_depend_on_the_key_and_the_place_alone(engine):
    together = generate_all(engine, PROMPTS, seeds=[11, 12, 13], num_per_prompt=3)
    alone = [
        generate_all(engine, [prompt], seeds=[seed], num_per_prompt=3)[0]
        for prompt, seed in zip(PROMPTS, [11, 12, 13], strict=True)
    ]

    assert [tokens(rows) for rows in together] == [tokens(rows) for rows in alone]
    # The same member, however many there are; with the sequential noise of the other mode it is another.
    assert tokens(generate_all(engine, PROMPTS[:1], seeds=[11], num_per_prompt=1)[0]) == tokens(together[0])[:1]
    assert tokens(generate_all(engine, PROMPTS[:1], seeds=[99], num_per_prompt=3)[0]) != tokens(together[0])
    engine.submit(Request(key=0, prompt=PROMPTS[0], seed=11, num_completions=2, first_member=1))
    ended = []
    while len(ended) < 2:
        ended += engine.collect()
    assert tokens(one.completion for one in sorted(ended, key=lambda one: one.member)) == tokens(together[0])[1:]


def test_turns_of_a_group_have_seeds_of_their_own():
    assert turn_seed(KEY, 0) == KEY
    assert turn_seed(KEY, 1) == 0x5BB669DC9215DB7B
    assert len({turn_seed(seed, turn) for seed in (KEY, 7) for turn in range(100)}) == 200


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["engine.kind=vllm"], "needs engine hf"),
        (["sampling.top_p=0.9"], "needs top_p = 1"),
        (["sampling.top_k=5"], "needs top_p = 1"),
        (["swap=in_flight"], "needs swap"),
    ],
)
def test_sampler_refuses_what_cannot_be_repeated(overrides, why):
    with pytest.raises(ConfigError, match=why):
        load(SamplerConfig, None, ["seeded_sampling=true", *overrides])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the device is good")
def test_device_that_is_not_there_is_named(tmp_path):
    model_dir = write_tiny_model(tmp_path, seed=0)

    with pytest.raises(ConfigError, match=r"engine.device: cannot use cuda:0: .*heterorl doctor"):
        HfEngine(
            model_dir=str(model_dir), published_dtype="fp32", compute_dtype="fp32", device="cuda:0",
            sampling=SAMPLING, batch_rows=8, end_token_ids=(1,),
        )  # fmt: skip
