"""Threads that build models leave torch as it was."""

import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from heterorl.common.errors import ConfigError
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.model.adapters import attach
from heterorl.common.model.model_loading import load_pretrained, warn_of_idle_gpus
from heterorl.common.types.common import Digest, LoraSettings
from heterorl.learner.backends.loading import empty_model
from tests.support.training import tiny_model

NUM_PAIRS = 20
LORA = LoraSettings(rank=1, alpha=1.0, target_modules=("q_proj",), base_digest=Digest(""))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), seed=0, hidden_size=32, num_layers=1))


def _functions():
    functions = {name: value for name, value in vars(nn.init).items() if callable(value)}
    return functions | {"register_parameter": nn.Module.register_parameter}


@pytest.fixture
def whole_torch():
    """Functions that models in the making replace; put back for the tests behind this one."""
    before = _functions()
    yield before
    nn.Module.register_parameter = before.pop("register_parameter")
    for name, value in before.items():
        setattr(nn.init, name, value)


def _at_once(*builds):
    """Each in a thread of its own, many times, with every round begun together; what they raised.

    Threads change often once all of them run: a thread that starts may meet coverage's tracer half installed.
    """
    together, errors, interval = threading.Barrier(len(builds)), [], sys.getswitchinterval()
    started = threading.Barrier(len(builds), action=lambda: sys.setswitchinterval(1e-5))

    def repeat(build):
        try:
            started.wait()
            for _ in range(NUM_PAIRS):
                together.wait()
                build()
        except Exception as error:  # noqa: BLE001 - handed to the test
            errors.append(error)
            together.abort()

    threads = [threading.Thread(target=repeat, args=(build,)) for build in builds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    return errors


@pytest.mark.parametrize("kind", ["new", "pretrained", "empty"])
def test_torch_is_as_it_was_after_two_threads_built_models_at_once(whole_torch, model_dir, kind):
    builds = {
        "new": tiny_model,
        "pretrained": lambda: load_pretrained(model_dir, dtype=torch.float32),
        "empty": lambda: empty_model(model_dir),
    }

    assert _at_once(builds[kind], builds[kind]) == []

    changed = [name for name, value in _functions().items() if value is not whole_torch[name]]
    assert changed == []


def test_adapters_have_values_while_another_thread_builds_a_model_without(whole_torch, model_dir):
    devices = set()

    def adapt():
        model = load_pretrained(model_dir, dtype=torch.float32)
        attach(model, LORA)
        devices.update(parameter.device.type for parameter in model.parameters())

    assert _at_once(adapt, lambda: empty_model(model_dir)) == []

    assert devices == {"cpu"}


@pytest.mark.parametrize("build", [lambda path: load_pretrained(path, dtype=torch.float32), empty_model])
def test_products_in_fp32_are_fp32_and_attention_is_not_planned_by_length(model_dir, build):
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        build(model_dir)

        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cuda.enable_cudnn_sdp(before[1])


@pytest.mark.parametrize("stated", ["fp8", "modelopt", None])
def test_quantised_weights_are_not_taken_for_weights(model_dir, tmp_path, monkeypatch, stated):
    # As on a GPU that computes in fp8: elsewhere transformers dequantises this form.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    weights = load_file(f"{model_dir}/model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].abs().max() / 448
        weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv" if stated == "fp8" else f"{name}_scale"] = scale.reshape(1, 1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(Path(model_dir, "config.json").read_text())
    if stated:
        config["quantization_config"] = {"quant_method": stated, "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match="are quantised") as caught:
        load_pretrained(str(tmp_path), dtype=torch.float32)
    assert caught.value.key == "model_dir"


@pytest.mark.parametrize(
    ("device", "has_gpus", "is_said"), [("cpu", True, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_a_model_on_the_cpu_next_to_idle_gpus_is_said(device, has_gpus, is_said, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    warn_of_idle_gpus("backend.device", device)

    assert ('backend.device is "cpu", but torch sees 8 GPUs: set it to "cuda"' in caplog.text) == is_said
