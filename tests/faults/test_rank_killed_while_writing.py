"""A rank is killed while it writes its part of a checkpoint beside a step: the one before it is whole, and resumes."""

import os
import signal
import threading
import time

import pytest

from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.learner_config import LearnerConfig
from heterorl.learner.publish.checkpoint_store import BACKEND_DIRECTORY, CheckpointStore, read_checkpoint
from tests.support.rank_jobs import run_job
from tests.support.rank_processes import Ranks
from tests.support.training import tiny_model

HOLDING = """
import os, sys, time
if "--rank" in sys.orig_argv:
    fsync = os.fsync
    def hold(descriptor):
        if os.path.exists({hold!r}):
            with open({held!r} + ".tmp", "w") as file:
                file.write(str(os.getpid()))
            os.replace({held!r} + ".tmp", {held!r})
            time.sleep(600)
        fsync(descriptor)
    os.fsync = hold
"""
"""Rank 1 has written its pieces, and is about to make them durable."""


def _read_when_there(path):
    while not path.exists():
        time.sleep(0.05)
    return path.read_text()


@pytest.mark.slow
def test_checkpoint_before_the_one_that_a_rank_died_in_resumes_at_another_number_of_ranks(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    hold, held, trained, root = (tmp_path / name for name in ("hold", "held", "trained", "checkpoints"))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HOLDING.format(hold=str(hold), held=str(held)))
    config = LearnerConfig.model_validate(
        {
            "model_dir": str(tmp_path / "model"), "sampling": {"max_new_tokens": 16}, "loss": {"kind": "gepo"},
            "backend": {"kind": "fsdp2", "lr": 1e-3, "micro_batch_tokens": 64, "threads": 1},
        }
    )  # fmt: skip
    ranks = Ranks(2, first_on_path=tmp_path / "site")
    operations = [
        ["train", 0], ["checkpoint", str(root), 1, 1, str(tmp_path / "first")], ["touch", str(hold)],
        ["checkpoint", str(root), 2, 2, str(trained)],
    ]  # fmt: skip
    answers = []

    def ask():
        try:
            answers.append(ranks.ask(config, operations))
        except AssertionError as error:
            answers.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        # All ranks have taken the step, although one of them cannot write.
        _read_when_there(trained)
        victim = int(_read_when_there(held))
        os.kill(victim, signal.SIGKILL)
        asking.join()
        assert ranks.process.wait() == 1
    finally:
        ranks.process.kill()
        asking.join()
        ranks.close()
    assert isinstance(answers[0], AssertionError)

    store = CheckpointStore(root)
    assert [path.name for path in store.paths()] == ["v00000001"]
    assert (root / "writing-v00000002").exists()
    assert read_checkpoint(store.paths()[0]).version == 1
    store.remove_unfinished()
    assert not (root / "writing-v00000002").exists()
    alone = TorchBackend(
        model_dir=config.model_dir,
        config=LearnerConfig.model_validate({"backend": {"lr": 1e-3, "micro_batch_tokens": 64}}).backend,
        loss=config.loss,
        sampling=config.sampling.semantics(),
    )
    alone.restore(store.paths()[0] / BACKEND_DIRECTORY)
    (root_of_state,) = run_job(alone, [["store"]])
    assert root_of_state == read_checkpoint(store.paths()[0]).state_root
