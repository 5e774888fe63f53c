"""What a step's passes compute with: the published rounding, with gradients for the masters."""

import numpy as np
import pytest
import torch

from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.weights.arena import Arena
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from heterorl.learner.train.model import Rounding, arena_weights
from tests.support.training import SAMPLING, is_identical, random_groups, tiny_model, weights


def _saved(tmp_path_factory, *, is_tied):
    directory = tmp_path_factory.mktemp("model")
    tiny_model(is_tied=is_tied).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return _saved(tmp_path_factory, is_tied=True)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def either_dir(tmp_path_factory, request):
    return _saved(tmp_path_factory, is_tied=request.param)


def _backend(model_dir, **options):
    config = TorchBackendConfig.model_validate({"lr": 1e-3, "micro_batch_tokens": 64, **options})
    return TorchBackend(model_dir=model_dir, config=config, loss=GepoConfig(), sampling=SAMPLING)


def _arena(backend):
    arena = Arena(backend.layout)
    backend.store(arena)
    return arena


def _logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 20)[None]).logits


def _gradients(backend):
    """Gradients of a step, by name, as the optimizer gets them."""
    found = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda entry, name=name: found.update({name: entry.grad.clone()}))
        for name, parameter in backend.torch_model.named_parameters()
    ]
    backend.train_step(random_groups(seed=3), head_version=1, step=1)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_passes_see_to_the_bit_what_an_engine_has_loaded(either_dir, dtype):
    backend = _backend(either_dir, published_dtype=dtype)
    backend.train_step(random_groups(), head_version=0, step=0)
    masters = _logits(backend.torch_model)
    engine = HfEngine(
        model_dir=str(either_dir), published_dtype=dtype, compute_dtype="fp32", device="cpu", sampling=SAMPLING,
        batch_rows=8, end_token_ids=(1,),
    )  # fmt: skip
    engine.load(_arena(backend), 1)

    with backend.computing():
        seen = _logits(backend.torch_model)

    assert torch.equal(seen, _logits(engine.model))
    assert torch.equal(seen, masters) == (dtype == "fp32")
    assert torch.equal(_logits(backend.torch_model), masters)


def test_gradient_is_that_of_the_published_weights_and_goes_to_the_masters(either_dir):
    one, other = (_backend(either_dir, forward_weights=name, lr=1e-2) for name in ("published", "masters"))
    one.train_step(random_groups(), head_version=0, step=0)
    masters = weights(one.torch_model)
    # The other learner's masters are the first one's published weights.
    other.load_published(_arena(one))
    gradients = [_gradients(backend) for backend in (one, other)]

    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, gradients[1][name]), name
    moved = weights(one.torch_model)
    # The step started from the masters: a step of 1e-2 from the rounding would end elsewhere.
    assert all((moved[name] - masters[name]).abs().max() <= 1.01e-2 for name in moved)
    assert not is_identical(moved, weights(other.torch_model))


def test_steps_too_small_for_the_published_type_add_up_in_the_masters(model_dir):
    backend = _backend(model_dir, lr=1e-6)
    before = _arena(backend)
    first = weights(backend.torch_model)

    for step in range(3):
        backend.train_step(random_groups(seed=step), head_version=step, step=step)

    changed = [int((_arena(backend).view(name) != before.view(name)).sum()) for name in before.layout.offsets]
    assert sum(changed) < before.layout.num_elements / 10
    assert all(not torch.equal(first[name], tensor) for name, tensor in weights(backend.torch_model).items())


@pytest.mark.parametrize("name", ["rounding", "arena"])
def test_masters_come_back_bit_for_bit_when_a_pass_fails(model_dir, name):
    backend = _backend(model_dir)
    before, arena = weights(backend.torch_model), _arena(backend)
    model = backend.torch_model
    context = Rounding(model, backend.layout).applied() if name == "rounding" else arena_weights(model, arena)

    def fail():
        with context:
            assert not is_identical(weights(model), before)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()

    assert is_identical(weights(model), before)


@pytest.mark.parametrize(
    "options", [{"compute_dtype": "bf16"}, {"gradient_checkpointing": True}, {"batching": "packed"}]
)
def test_choice_goes_together_with_the_others(model_dir, options):
    published, masters = (_backend(model_dir, forward_weights=name, **options) for name in ("published", "masters"))

    one, other = (backend.train_step(random_groups(), head_version=0, step=0) for backend in (published, masters))

    assert one.is_applied
    assert one.loss == pytest.approx(other.loss, abs=0.05)
    assert one.loss != other.loss
    assert np.isfinite(one.grad_norm)
