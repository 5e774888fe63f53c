"""Architectures: each is read from files, trained, published and drawn from, and stays one policy, or is refused.

`docs/models.md` shows the table; the divided backends take the same models in `fsdp2/test_fsdp2_families.py` and in
`tests/engines/test_deepspeed_families.py`.
"""

from pathlib import Path

import numpy as np
import pytest

from heterorl.common.errors import ConfigError
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.inference_engine import generate_all
from heterorl.common.weights.arena import Arena
from heterorl.common.weights.payload import apply_payload, write_delta, write_snapshot
from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from tests.support.families import FAMILIES, TRAINED, write_family
from tests.support.training import SAMPLING, group, queued, rollout

DOCUMENT = Path(__file__).parents[4] / "docs" / "models.md"
QUICK = ("qwen3", "glm4-moe")
"""What a change must pass, of everything; all of them take a minute."""
TOLERANCE = 1e-6
"""Of KL(learner || sampler), nats per token: the passes see the weights that the sampler has."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directories = {}

    def write(name):
        if name not in directories:
            directories[name] = write_family(name, tmp_path_factory.mktemp(name))
        return directories[name]

    return write


def _engine(model_dir, published_dtype):
    return HfEngine(
        model_dir=str(model_dir), published_dtype=published_dtype, compute_dtype="fp32", device="cpu",
        sampling=SAMPLING, batch_rows=32, end_token_ids=(1,),
    )  # fmt: skip


def _backend(name, model_dir, *, published_dtype="bf16", batching="padded"):
    config = TorchBackendConfig(
        lr=3e-3, published_dtype=published_dtype, batching=batching, micro_batch_tokens=96,
        attn_implementation=FAMILIES[name].attention,
    )  # fmt: skip
    return TorchBackend(model_dir=model_dir, config=config, loss=GepoConfig(), sampling=SAMPLING)


def _groups(engine, *, version):
    """Groups drawn by the engine; the reward is the share of even tokens."""
    prompts = [np.array(ids, np.int32) for ids in ([2, 3, 4], [5, 6, 7, 8], [9, 2], [11, 3, 3])]
    groups = []
    for number, rows in enumerate(generate_all(engine, prompts, seeds=[1, 2, 3, 4], num_per_prompt=4)):
        members = [
            rollout(row.token_ids, row.logprobs, float(np.mean(row.token_ids % 2 == 0)), version=version)
            for row in rows
        ]
        groups.append(queued(group(members, prompt=prompts[number], sequence=number + 1, version=version)))
    return groups


@pytest.mark.parametrize(("published_dtype", "batching"), [("fp32", "packed"), ("bf16", "padded")])
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in TRAINED
        if not FAMILIES[name].engine
    ],
)
def test_family_is_trained_published_pulled_and_drawn_from_as_one_policy(
    written, tmp_path, name, published_dtype, batching
):
    if batching not in FAMILIES[name].batching:
        with pytest.raises(ConfigError, match="does not keep texts apart") as caught:
            _backend(name, written(name), published_dtype=published_dtype, batching=batching)
        assert caught.value.key == "backend.batching"
        batching = "padded"
    backend = _backend(name, written(name), published_dtype=published_dtype, batching=batching)
    engine = _engine(written(name), published_dtype)
    assert engine.layout.layout_id == backend.layout.layout_id

    arenas, reports, pulled = [], [], Arena(engine.layout)
    for version in range(3):
        path = tmp_path / str(version)
        arenas.append(Arena(backend.layout))
        backend.store(arenas[-1])
        if version:
            write_delta(path, arenas[-2], arenas[-1])
        else:
            write_snapshot(path, arenas[-1])
        apply_payload(path, pulled, expected_from_root=arenas[-2].state_root() if version else None)
        assert pulled.state_root() == arenas[-1].state_root()
        engine.load(pulled, version)
        reports.append(backend.train_step(_groups(engine, version=version), head_version=version, step=version))

    assert all(report.is_applied for report in reports)
    assert len({arena.state_root() for arena in arenas}) == 3
    # The learner finds the sampler's tokens as probable as the sampler did, so every weight is in its place.
    assert [report.kl for report in reports] == pytest.approx([0.0] * 3, abs=TOLERANCE)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.refused])
def test_family_that_cannot_be_trained_is_refused_at_the_start(written, name):
    key, words = FAMILIES[name].refused

    with pytest.raises(ConfigError, match=words) as caught:
        _backend(name, written(name))
    assert caught.value.key == key
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.engine])
def test_family_that_an_engine_cannot_draw_from_is_refused_by_it(written, name):
    key, words = FAMILIES[name].engine
    _backend(name, written(name))

    with pytest.raises(ConfigError, match=words) as caught:
        _engine(written(name), "bf16")
    assert caught.value.key == key


@pytest.mark.parametrize("name", ["gpt-oss", "mamba"])
def test_model_without_sdpa_is_refused_by_the_key_that_it_needs(written, name):
    config = TorchBackendConfig(micro_batch_tokens=96)

    with pytest.raises(ConfigError, match='set it to "eager"') as caught:
        TorchBackend(model_dir=written(name), config=config, loss=GepoConfig(), sampling=SAMPLING)
    assert caught.value.key == "backend.attn_implementation"


def test_table_of_the_documents_has_these_rows():
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text[text.index("| model | trains |") :].split("\n\n", 1)[0]

    assert table.splitlines()[2:] == [family.row for family in FAMILIES.values()]
