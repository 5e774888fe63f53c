"""Two DeepSpeed ranks train in a project that has a package `services` of its own."""

import pytest

from heterorl.learner.learner_config import LearnerConfig
from tests.support.foreign import foreign_project
from tests.support.rank_processes import Ranks
from tests.support.training import tiny_model

pytestmark = pytest.mark.timeout(600)


def test_ranks_train_beside_foreign_services(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    model_dir = tmp_path / "model"
    tiny_model().save_pretrained(model_dir)
    config = LearnerConfig.model_validate(
        {
            "model_dir": str(model_dir), "state_dir": str(tmp_path / "state"), "task": {"name": "arithmetic", "digits": 1},
            "sampling": {"max_new_tokens": 8}, "group_size": 4, "groups_per_step": 5,
            "backend": {"kind": "deepspeed", "stage": 2, "lr": 1e-3, "threads": 1},
        }
    )  # fmt: skip
    project = tmp_path / "project"
    project.mkdir()

    with foreign_project(project, monkeypatch):
        ranks = Ranks(2)
        try:
            (report,) = ranks.ask(config, [["train", 1]])
        finally:
            code = ranks.close()

    assert code == 0
    assert report["is_applied"]
