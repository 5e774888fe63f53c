"""What differs between ranks is refused on all of them, by its key, before anything is built."""

import threading
from pathlib import Path

import pytest

from heterorl.common.errors import ConfigError
from heterorl.learner.backends.ranks import rank_group
from heterorl.learner.backends.ranks.rank_env import RankEnv
from heterorl.learner.backends.ranks.rank_group import check_alike, code_digest, model_digest, packages_of, releases_of
from heterorl.learner.loss.loss_config import CustomLossConfig, GepoConfig
from heterorl.learner.train.backend_config import DeepSpeedBackendConfig, Fsdp2BackendConfig
from tests.support.thread_ranks import on_all_ranks

HERE = threading.local()


def _checked(monkeypatch, releases, *, models=("", ""), losses=None):
    monkeypatch.setattr(rank_group, "releases_of", lambda packages: releases[HERE.rank])

    def work(ranks):
        HERE.rank = ranks.rank
        ranks.are_on_one_machine = False
        ranks.rank_env = RankEnv(rank=ranks.rank, local_rank=0, world_size=2, local_world_size=1)
        loss = GepoConfig() if losses is None else losses[ranks.rank]
        return check_alike(ranks, model_dir=str(models[ranks.rank]), device="cpu", packages=[], loss=loss)

    return on_all_ranks(2, work)


def test_package_that_one_machine_has_otherwise_is_named_on_all(monkeypatch, models):
    same = {"torch": "2.13.0", "deepspeed": "0.19.8"}

    answers = _checked(monkeypatch, [same, same | {"deepspeed": "none"}], models=models("weights", "weights"))

    assert [type(answer) for answer in answers] == [ConfigError, ConfigError]
    assert all("deepspeed 0.19.8 at rank 0, none at rank 1" in str(answer) for answer in answers)


def test_package_of_which_one_rank_does_not_speak_is_named_on_all(monkeypatch, models):
    answers = _checked(monkeypatch, [{"torch": "2.13.0"}, {}], models=models("weights", "weights"))

    assert [type(answer) for answer in answers] == [ConfigError, ConfigError]
    assert all("torch 2.13.0 at rank 0, none at rank 1" in str(answer) for answer in answers)


def test_model_that_one_machine_has_otherwise_is_named_on_all(monkeypatch, models):
    assert _checked(monkeypatch, [{}, {}], models=models("weights", "weights")) == [None, None]

    answers = _checked(monkeypatch, [{}, {}], models=models("weights", "weighty"))

    assert [answer.key for answer in answers] == ["model_dir", "model_dir"]


def test_custom_loss_that_one_machine_has_otherwise_is_named_on_all(monkeypatch, models, tmp_path):
    losses = []
    # As two machines have a module under one name, but one process imports it once.
    for name, weight in (("loss_a", 1), ("loss_b", 1), ("loss_c", 2)):
        (tmp_path / f"{name}.py").write_text(f"def loss(batch):\n    return {weight} * batch\n")
        losses.append(CustomLossConfig(function=f"{name}:loss", directory=str(tmp_path)))
    losses.append(CustomLossConfig(function="loss_d:loss", directory=str(tmp_path)))
    weights = models("weights", "weights")
    assert _checked(monkeypatch, [{}, {}], models=weights, losses=losses[:2]) == [None, None]

    for other, problem in ((losses[2], "its file of rank 1 differs"), (losses[3], "no module loss_d")):
        answers = _checked(monkeypatch, [{}, {}], models=weights, losses=[losses[0], other])

        assert [answer.key for answer in answers] == ["loss.function", "loss.function"]
        assert all(problem in str(answer) for answer in answers)


def test_packages_are_those_that_the_backend_computes_with():
    assert packages_of(Fsdp2BackendConfig()) == ["transformers"]
    assert packages_of(DeepSpeedBackendConfig(liger=True, device="cuda")) == [
        "transformers",
        "deepspeed",
        "liger-kernel",
    ]
    assert "flash-attn" in packages_of(
        Fsdp2BackendConfig(attn_implementation="flash_attention_2", device="cuda", compute_dtype="bf16")
    )
    found = releases_of(["transformers", "no-such-package"])
    assert found["no-such-package"] == "none"
    assert found["transformers"][0].isdigit()


@pytest.fixture
def models(tmp_path):
    def make(*contents):
        directories = []
        for number, content in enumerate(contents):
            directory = tmp_path / f"{number}-{content}"
            directory.mkdir(exist_ok=True)
            (directory / "config.json").write_text("{}")
            (directory / "model.safetensors").write_bytes(content.encode())
            directories.append(directory)
        return directories

    return make


def test_digest_of_a_model_is_of_its_bytes(models):
    one, two, other = models("weights", "weights2"[:7], "weighty")

    assert model_digest(str(one)) == model_digest(str(two))
    assert model_digest(str(one)) != model_digest(str(other))


def test_digest_of_the_code_is_of_what_a_rank_computes_with(tmp_path):
    def lay(name, **modules):
        for path, text in modules.items():
            module = tmp_path / name / f"{path.replace('__', '/')}.py"
            module.parent.mkdir(parents=True, exist_ok=True)
            module.write_text(text)
        return code_digest(tmp_path / name)

    first = lay("first", learner__losses__gepo="a = 1\n", common__types="b = 2\n", lab__cell="c = 3\n")

    assert first == lay("same", learner__losses__gepo="a = 1\n", common__types="b = 2\n", lab__cell="c = 4\n")
    assert first != lay("other", learner__losses__gepo="a = 2\n", common__types="b = 2\n")
    assert first != lay("moved", learner__losses__gspo="a = 1\n", common__types="b = 2\n")
    assert first != lay("more", learner__losses__gepo="a = 1\n", common__types="b = 2\n", common__empty="")
    own = releases_of([])["code of heterorl"]
    assert own == code_digest(Path(rank_group.__file__).parents[3]) != code_digest(tmp_path / "nothing")
