"""What the engines of a node share: a version's file and the reference's answers are made once for all of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from heterorl.common.errors import ConfigError
from heterorl.sampler.vllm import weight_canary
from tests.support.engines import disturbed, vllm_source, write_model

SEQUENCES = [np.array([5, 9, 2, 7], np.int32), np.array([1, 2, 3], np.int32)]


@pytest.fixture
def source(tmp_path):
    source = vllm_source(write_model(tmp_path / "model"), tmp_path / "weights")
    yield source
    source.close()


def test_a_versions_file_is_written_once_and_gone_after_the_last_reader(source, monkeypatch):
    base, written = source.base(), []
    write = source.weights.write
    monkeypatch.setattr(source.weights, "write", lambda arena: written.append(arena) or write(arena))

    with source.written(base):
        with source.written(base):
            pass
        assert [path.name for path in source.weights.directory.iterdir()] == ["model.safetensors"]
        # Two processes may start from it side by side.
        with source.weights.whole_model() as one, source.weights.whole_model() as other:
            assert one != other
        assert [path.name for path in source.weights.directory.iterdir()] == ["model.safetensors"]

    assert len(written) == 1
    assert list(source.weights.directory.iterdir()) == []
    assert source.base() is None


def test_a_process_starts_from_the_models_own_configuration(tmp_path):
    """As transformers 5 writes it, it would lack keys of transformers 4."""
    path = write_model(tmp_path / "model") / "config.json"
    config = json.loads(path.read_text()) | {"rope_theta": 5.0}
    path.write_text(json.dumps(config))
    source = vllm_source(path.parent, tmp_path / "weights")

    with source.written(source.base()), source.weights.whole_model() as start:
        assert json.loads(Path(start, "config.json").read_text()) == config
    source.close()


def test_a_file_that_cannot_be_written_leaves_nothing(source, monkeypatch):
    base = source.base()
    with monkeypatch.context() as patched:
        patched.setattr(source.weights, "write", lambda arena: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"), source.written(base):
            pass

    with source.written(base):
        assert len(list(source.weights.directory.iterdir())) == 1


def test_equal_sequences_are_computed_once_for_each_version(source, monkeypatch):
    base, passes = source.base(), []
    logprobs = weight_canary.Reference.logprobs
    monkeypatch.setattr(
        weight_canary.Reference, "logprobs", lambda self, *args: passes.append(args[1]) or logprobs(self, *args)
    )
    with source.written(base):
        first = source.expected(base, SEQUENCES, [2, 1])
        assert source.expected(base, [one.copy() for one in SEQUENCES], [2, 1]) is first
        assert len(source.expected(base, SEQUENCES[:1], [2])) == 1
    assert len(passes) == 2

    state = disturbed(base, seed=1)
    with source.written(state):
        again = source.expected(state, SEQUENCES, [2, 1])
    assert len(passes) == 3
    assert np.abs(again[0] - first[0]).max() > 1e-3


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="model_dir"):
        vllm_source(tmp_path / "nothing", tmp_path / "weights")
