"""vLLM over adapters: what it draws is what the merged model says, swap after swap, in flight too."""

import copy
import threading

import numpy as np
import pytest
import torch

from heterorl.common.errors import StaleWeights
from heterorl.common.generation.inference_engine import generate_all
from heterorl.common.model import tensors
from heterorl.common.model.adapters import attach
from heterorl.common.model.contract import LoraConfig
from heterorl.common.types.rollout import Span
from heterorl.sampler.vllm import shared_model as weights
from tests.support.adapters import merge
from tests.support.engines import PROMPTS, Truth, semantics, vllm_engine, write_model

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow, pytest.mark.filterwarnings("default")]
# Not a rank that vLLM has: it fills up with zeros.
LORA = LoraConfig(rank=3, alpha=6.0)
SAMPLING = semantics(temperature=0.8)


class MergedTruth(Truth):
    """A forward of the base model with the adapters added to its weights in float32."""

    def __init__(self, model_dir, lora):
        super().__init__(model_dir)
        self._base, self._lora = self._model, lora

    def logprobs(self, arena, prompt, row, sampling):
        self._model = copy.deepcopy(self._base)
        attach(self._model, self._lora)
        tensors.load(arena, self._model)
        merge(self._model)
        whole = torch.tensor([[*prompt.tolist(), *row.token_ids.tolist()]])
        with torch.no_grad():
            logits = self._model(input_ids=whole).logits[0, prompt.size - 1 : -1] / sampling.temperature
        return logits.log_softmax(-1).gather(1, whole[0, prompt.size :, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        directory = tmp_path_factory.mktemp("engine")
        model_dir = write_model(directory / "model")
        engine = vllm_engine(model_dir, directory / "weights", temperature=0.8, engine={"lora": LORA})
        yield engine, engine.base(), MergedTruth(model_dir, engine.lora)
        engine.close()


def adapters(base, *, seed):
    """Adapters that change what is drawn: B starts at 0, so base alone changes nothing."""
    rng, result = np.random.default_rng(seed), base.copy()
    for spec in result.layout.specs:
        values = result.view(spec.name).view(np.float32)
        values[...] = 0.2 * rng.standard_normal(values.shape)
    return result


def test_adapters_are_drawn_with_as_merged_and_never_those_of_another_version(made):
    engine, base, truth = made
    assert all(spec.name.endswith(("lora_a", "lora_b")) for spec in engine.layout.specs)
    state = base
    for version in range(4):
        engine.load(state, version)
        groups = generate_all(engine, PROMPTS, seeds=[1, 2, 3, 4], num_per_prompt=4)

        assert truth.difference(state, groups, SAMPLING) < 1e-4
        assert all(row.spans == (Span(version=version, start=0, end=len(row.token_ids)),) for g in groups for row in g)
        state = adapters(base, seed=version)
        assert truth.difference(state, groups, SAMPLING) > 1e-2
    assert engine.swap_check_difference < 1e-5
    assert engine.layout.full_bytes < 200_000


def _swapped_during_a_batch(engine, old, new):
    engine.load(old, 11)
    groups = []
    batch = threading.Thread(
        target=lambda: groups.extend(generate_all(engine, PROMPTS, seeds=[1, 2, 3, 4], num_per_prompt=60))
    )
    batch.start()
    while not engine._alive()._running:
        pass
    engine.load(new, 12)
    batch.join()
    return groups


def test_swap_of_adapters_in_flight_keeps_what_is_under_way(made):
    engine, base, truth = made
    old, new = adapters(base, seed=11), adapters(base, seed=12)
    # On a busy machine a swap can be over before the first token.
    for _ in range(5):
        groups = _swapped_during_a_batch(engine, old, new)
        if {span.version for members in groups for row in members for span in row.spans} == {11, 12}:
            break

    rows = [(prompt, row) for prompt, members in zip(PROMPTS, groups, strict=True) for row in members]
    assert {span.version for _, row in rows for span in row.spans} == {11, 12}
    for prompt, row in rows:
        first = row.spans[0]
        of_first = truth.logprobs({11: old, 12: new}[first.version], prompt, row, SAMPLING)
        np.testing.assert_allclose(row.logprobs[: first.end], of_first[: first.end], atol=1e-4)


def test_damaged_adapters_are_seen_and_the_next_load_starts_again(made, monkeypatch):
    engine, base, truth = made
    state = adapters(base, seed=21)
    engine.load(adapters(base, seed=20), 20)
    write = weights.write_weights
    with monkeypatch.context() as patched:
        patched.setattr(
            weights, "write_weights", lambda arena, path, names, rename: write(base, path, names=names, rename=rename)
        )
        with pytest.raises(StaleWeights):
            engine.load(state, 21)

    old = engine._process
    engine.load(state, 21)
    assert engine._process is not old
    groups = generate_all(engine, PROMPTS, seeds=[1, 2, 3, 4], num_per_prompt=2)
    assert truth.difference(state, groups, SAMPLING) < 1e-4
