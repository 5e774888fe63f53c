"""FSDP2 with compiled blocks takes the steps that it takes without, also where blocks are computed twice."""

import shutil

import pytest

from heterorl.learner.learner_config import LearnerConfig
from tests.support.rank_processes import Ranks
from tests.support.training import tiny_model

pytestmark = [pytest.mark.timeout(580), pytest.mark.slow]
COMPILERS = [
    # All of the tracing and none of the C++. Rank 0 alone can be told to compile so.
    pytest.param(1, "aot_eager", id="traced"),
    pytest.param(
        2,
        "",
        marks=[pytest.mark.compiler, pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler")],
        id="inductor",
    ),
]


@pytest.mark.parametrize(("num_ranks", "compiler"), COMPILERS)
def test_compiled_blocks_take_the_same_steps(monkeypatch, tmp_path, num_ranks, compiler):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    tiny_model().save_pretrained(tmp_path / "model")
    ranks = Ranks(num_ranks, compiler=compiler)

    def steps(**backend):
        table = {
            "model_dir": str(tmp_path / "model"),
            "sampling": {"max_new_tokens": 16},
            "backend": {"kind": "fsdp2", "lr": 1e-3, "micro_batch_tokens": 64, "threads": 1, **backend},
        }
        operations = [["train", 0], ["train", 1], ["num_graphs"]]
        return ranks.ask(LearnerConfig.model_validate(table), operations)

    *expected, num_before = steps()
    *actual, num_plain = steps(compile=True)
    *again, _ = steps(compile=True, gradient_checkpointing=True)

    assert ranks.close() == 0
    # Both blocks share their graphs: one for the first shape, at most one more for any other.
    assert num_before == 0 < num_plain <= 2
    for one, other, third in zip(actual, again, expected, strict=True):
        for key in ("loss", "grad_norm", "entropy"):
            assert one[key] == pytest.approx(third[key], abs=1e-5), key
            assert other[key] == pytest.approx(third[key], abs=1e-5), key
