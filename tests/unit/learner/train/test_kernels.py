"""Compiled passes take the same steps; Liger's kernels are refused where they cannot run."""

import functools
import importlib.util
import shutil

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import DeepSpeedBackendConfig, TorchBackendConfig
from heterorl.learner.train.model import apply_liger
from tests.support.training import SAMPLING, random_groups, tiny_model, weights


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(directory)
    return directory


def _backend(model_dir, **changes):
    config = TorchBackendConfig(lr=1e-3, **changes)
    return TorchBackend(model_dir=model_dir, config=config, loss=GepoConfig(), sampling=SAMPLING)


BACKENDS = [
    # All of the tracing and none of the C++.
    pytest.param("aot_eager", marks=pytest.mark.slow),
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.compiler,
            pytest.mark.slow,
            pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler"),
        ],
    ),
]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("compiler", BACKENDS)
def test_compiled_learner_takes_the_same_steps(model_dir, monkeypatch, tmp_path, compiler):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=compiler))
    eager, compiled = _backend(model_dir), _backend(model_dir, compile=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    # Of another shape each, where time does not matter. In the first one sizes differ: torch takes equal ones for one size.
    for step, seed in enumerate((2, 1) if compiler == "inductor" else (2,), start=1):
        expected = eager.train_step(random_groups(seed=seed), head_version=step, step=step)
        actual = compiled.train_step(random_groups(seed=seed), head_version=step, step=step)
        assert actual.loss == pytest.approx(expected.loss, abs=1e-5)
        assert actual.grad_norm == pytest.approx(expected.grad_norm, abs=1e-5)

    # Both blocks share it.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    assert compiled.layout.layout_id == eager.layout.layout_id
    for one, other in zip(weights(compiled.torch_model).values(), weights(eager.torch_model).values(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_compilation_of_divided_weights_is_refused():
    with pytest.raises(ValidationError, match="compile needs stage 0, 1 or 2"):
        DeepSpeedBackendConfig(stage=3, compile=True)


def test_liger_is_refused_on_the_cpu():
    with pytest.raises(ValidationError, match="liger's kernels run on a GPU only"):
        TorchBackendConfig(liger=True)
    with pytest.raises(ConfigError, match=r"backend\.liger.*GPU only"):
        apply_liger(tiny_model(), TorchBackendConfig().model_copy(update={"liger": True}))


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_liger_that_is_not_installed_is_named_with_its_extra():
    with pytest.raises(DependencyMissing, match=r"'\.\[gpu\]'"):
        apply_liger(tiny_model(), TorchBackendConfig(device="cuda", liger=True))
