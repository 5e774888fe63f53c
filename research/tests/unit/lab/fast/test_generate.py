"""Completions of stacked runs against the services' engine: the same noise, hence the same tokens."""

import numpy as np
import pytest
import torch

from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import generate_all
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.model import tensors
from heterorl.common.tasks.task_config import TaskConfig, build_task
from heterorl.common.types.common import LogprobMode, SamplingSemantics
from heterorl.common.weights.arena import Arena
from heterorl_research.lab.fast import stack
from heterorl_research.lab.fast.evaluation import Drawing, additive_mask
from heterorl_research.lab.fast.forward import fold
from heterorl_research.lab.fast.layout import Sizes, prefix_rows
from heterorl_research.lab.fast.work import Assignments, Texts, make_work

TASK = build_task(TaskConfig(name="arithmetic", digits=2))
TOKENS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return [write_tiny_model(base / str(seed), seed=seed, hidden_size=32, num_layers=2) for seed in (1, 2)]


def drawing_of(model_dir, *, is_sharing=True, temperature=0.6, tokens=TOKENS):
    texts = Texts(model_dir)
    sizes = Sizes(num_prompts=3, group_size=4, prompt_length=6, max_new_tokens=tokens, vocab_size=19)
    return Drawing(
        task=TASK,
        texts=texts,
        sizes=sizes,
        mask_SS=additive_mask(sizes, torch.device("cpu")),
        sampling=SamplingSemantics(
            temperature=temperature, top_p=1.0, top_k=0, max_new_tokens=tokens, logprob_mode=LogprobMode.PROCESSED
        ),
        device=torch.device("cpu"),
        is_sharing=is_sharing,
    )


def folded_of(models, sizes):
    shape = stack.read_model(models[0])[0]
    masters = torch.stack([stack.read_model(path)[1] for path in models])
    return fold(shape, stack.views(stack.published(masters), shape), num_positions=sizes.num_positions)


@pytest.mark.parametrize("is_sharing", [True, False])
def test_tokens_and_log_probs_are_those_of_the_services_engine(models, is_sharing):
    drawing = drawing_of(models[0], is_sharing=is_sharing)
    prompts = [TASK.prompt(index) for index in range(3)]
    seeds = [[11, 12, 13], [21, 22, 23]]
    works = [make_work(prompts, some, texts=drawing.texts, sizes=drawing.sizes) for some in seeds]
    found = drawing.draw(folded_of(models, drawing.sizes), works, version=0)

    lengths = set()
    for model_dir, some, rollouts in zip(models, seeds, found, strict=True):
        engine = HfEngine(
            model_dir=str(model_dir), published_dtype="bf16", compute_dtype="fp32", device="cpu",
            sampling=drawing.sampling, batch_rows=64, end_token_ids=(drawing.texts.eos_token_id,),
        )  # fmt: skip
        arena = Arena(engine.layout)
        tensors.store(engine.model, arena)
        engine.load(arena, 0)
        ids = [drawing.texts.prompter.encode(prompt.text) for prompt in prompts]
        for group, members in enumerate(generate_all(engine, ids, seeds=some, num_per_prompt=4)):
            for member, completion in enumerate(members):
                length = completion.token_ids.size
                lengths.add(length)
                assert rollouts.drawn.lengths_RGM[group, member] == length
                assert rollouts.drawn.tokens_RGMT[group, member, :length].tolist() == completion.token_ids.tolist()
                assert not rollouts.drawn.tokens_RGMT[group, member, length:].any()
                logs = rollouts.drawn.logprobs_RGMT[group, member, :length]
                assert np.allclose(logs, completion.logprobs, atol=1e-5)
    assert len(lengths) > 2


def test_a_run_draws_the_same_whoever_is_beside_it(models):
    drawing = drawing_of(models[0])
    work = Assignments(task=TASK, texts=drawing.texts, sizes=drawing.sizes).of_step(5, 2)
    together = drawing.draw(folded_of([*models, *models], drawing.sizes), [work] * 4, version=0)
    alone = drawing.draw(folded_of(models[1:], drawing.sizes), [work], version=0)[0]

    for field in ("tokens_RGMT", "logprobs_RGMT", "lengths_RGM", "first_RGMT"):
        assert np.array_equal(getattr(together[3].drawn, field), getattr(alone.drawn, field))
        assert np.array_equal(getattr(together[1].drawn, field), getattr(alone.drawn, field))


def test_a_prefix_that_prompts_of_a_run_share_is_one_row():
    prompts = np.array([[[3, 4, 5], [3, 4, 6], [7, 4, 5]], [[3, 4, 5], [3, 4, 5], [3, 4, 5]]])
    rows, counts = prefix_rows(prompts, 19)

    assert counts == [7, 3]
    assert rows[0].tolist() == [[0, 2, 4], [0, 2, 5], [1, 3, 6]]
    assert rows[1].tolist() == [[7, 8, 9]] * 3


def test_texts_by_table_are_those_of_the_tokenizer(models):
    texts = Texts(models[0])
    assert texts._is_table
    rng = np.random.default_rng(1)
    for _ in range(50):
        ids = rng.integers(0, 19, 9)
        assert texts.decode(ids.tolist()) == texts.prompter.decode(ids.astype(np.int32))
    assert texts.encode("12+34=") == texts.prompter.encode("12+34=").tolist()
    assert texts.encode("12?") == texts.prompter.encode("12?").tolist()
