"""From [engine] to engines: which devices each has, and what of vLLM's arguments may be passed through."""

from types import SimpleNamespace

import pytest

from heterorl.common.errors import ConfigError, EngineDied
from heterorl.common.process.config_file import load
from heterorl.sampler import engines
from heterorl.sampler.engines import EngineGroup, build_engines, start_vllm, vllm_settings
from heterorl.sampler.sampler_config import OWN_ARGUMENTS, SamplerConfig, VllmEngineConfig
from heterorl.sampler.vllm.vllm_engine import engine_arguments
from tests.support.engines import EOS, write_model


def config(*overrides):
    return load(SamplerConfig, None, list(overrides))


def arguments(*overrides):
    made = vllm_settings(config("engine.kind=vllm", *overrides).engine)
    return [engine_arguments(one, max_model_len=128, logprobs_mode="raw_logprobs") for one in made]


def test_each_engine_has_its_own_devices():
    four = arguments("engine.devices=[0,1,2,3]", "engine.tensor_parallel_size=2")

    assert [one["device_ids"] for one in four] == [[0, 1], [2, 3]]
    assert {one["tensor_parallel_size"] for one in four} == {2}
    assert ["device_ids" in one for one in arguments("engine.engines=3", "engine.memory_share=0.3")] == [False] * 3


def test_arguments_of_vllm_are_passed_through():
    (one,) = arguments("engine.extra={quantization='fp8',block_size=32}")

    assert (one["quantization"], one["block_size"]) == ("fp8", 32)
    assert "enforce_eager" not in one
    (eager,) = arguments("engine.enforce_eager=true")
    assert eager["enforce_eager"] is True


def test_every_argument_that_is_set_here_is_refused_from_outside():
    options = VllmEngineConfig(compute_dtype="bf16", batch_rows=8, devices=(0,), enforce_eager=True)

    assert engine_arguments(options, max_model_len=8, logprobs_mode="raw_logprobs").keys() <= OWN_ARGUMENTS


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["engine.kind=vllm", "engine.extra={max_num_seqs=4}"], "max_num_seqs: heterorl sets it itself"),
        (["engine.kind=vllm", "engine.extra={data_parallel_size=4}"], "data_parallel_size: heterorl sets it itself"),
        (
            ["engine.kind=vllm", "engine.devices=[0,1,2]", "engine.tensor_parallel_size=2"],
            "has 3 GPUs; tensor_parallel_size = 2 needs a multiple of 2",
        ),
        (["engine.kind=vllm", "engine.devices=[0,1]", "engine.engines=2"], "remove engines"),
        (["engine.devices=[0,1]", "engine.engines=2"], "remove engines"),
        (["engine.devices=[1,1]"], "a device twice"),
        (["engine.devices=[0]", "engine.device=cuda:1"], "engine: devices and device both name GPUs: remove device"),
        (["engine.kind=vllm", "engine.engines=3"], "together above 1; set it to 0.3 or less"),
    ],
)
def test_contradictions_are_named(overrides, why):
    with pytest.raises(ConfigError, match=why):
        config(*overrides)


def test_hf_engines_stand_behind_one(tmp_path):
    model_dir = write_model(tmp_path / "model")

    def built(*overrides):
        values = [f"model_dir={model_dir}", "published_dtype=fp32", *overrides]
        return build_engines(config(*values), end_token_ids=(EOS,))

    two, one = built("engine.engines=2", "engine.batch_rows=4"), built()

    assert isinstance(two.engine, EngineGroup)
    assert two.engine.max_running == 8
    assert not isinstance(one.engine, EngineGroup)
    assert two.base().state_root() == one.base().state_root()
    two.engine.load(two.base(), 4)
    assert two.engine.version == 4
    two.close()


def test_one_engine_that_does_not_start_ends_the_others(monkeypatch):
    ended = []

    class Starting:
        def __init__(self, source, *, settings, **_):
            self.devices = settings.devices
            if self.devices == (1,):
                raise EngineDied("no memory")

        def close(self):
            ended.append(self.devices)

    monkeypatch.setattr(engines, "VllmEngine", Starting)
    options = [VllmEngineConfig(compute_dtype="bf16", batch_rows=8, devices=(device,)) for device in range(3)]

    with pytest.raises(EngineDied, match="no memory"):
        start_vllm(SimpleNamespace(close=lambda: ended.append("source")), options, end_token_ids=(EOS,))

    assert (sorted(ended[:-1]), ended[-1]) == ([(0,), (2,)], "source")
