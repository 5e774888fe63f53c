"""Step sizes by the run's step: the same as torch's and transformers', whatever process asks."""

import pytest
import torch
from pydantic import ValidationError
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from heterorl.learner.backends.torch_backend import TorchBackend
from heterorl.learner.loss.loss_config import GepoConfig
from heterorl.learner.train.backend_config import TorchBackendConfig
from tests.support.training import SAMPLING, random_groups, tiny_model


def _rates(schedule, num_steps=14):
    return [schedule.rate(step=done + 1, applied_steps=done) for done in range(num_steps)]


def test_step_size_grows_linearly_then_stays():
    assert _rates(TorchBackendConfig(lr=0.8, warmup_steps=4), 6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert TorchBackendConfig(lr=0.8).rate(step=1, applied_steps=0) == 0.8


@pytest.mark.parametrize(
    ("shape", "make"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_decay_is_that_of_transformers(shape, make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
    # transformers would take its first step, of size 0, before ours.
    theirs = make(optimizer, num_warmup_steps=3, num_training_steps=10)
    expected = []
    for _ in range(14):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()

    ours = _rates(TorchBackendConfig(lr=0.8, warmup_steps=3, lr_schedule=shape, lr_decay_steps=10))

    # After its end the cosine of transformers rises again.
    assert ours[3:11] == pytest.approx(expected[3:11], abs=1e-12)
    assert ours[:3] == pytest.approx([0.8 / 3, 1.6 / 3, 0.8])


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_decay_ends_at_the_final_ratio_and_stays(shape):
    rates = _rates(TorchBackendConfig(lr=1.0, lr_schedule=shape, lr_decay_steps=10, lr_final_ratio=0.25))

    assert rates[0] == 1.0
    # Half way, linear and cosine are both in the middle of 1 and 0.25.
    assert rates[5] == pytest.approx(0.625)
    assert rates[10:] == [0.25] * 4
    assert rates == sorted(rates, reverse=True)


def test_new_optimizer_warms_up_again_and_the_decay_goes_on():
    schedule = TorchBackendConfig(lr=1.0, warmup_steps=4, lr_schedule="linear", lr_decay_steps=14)

    # After 9 steps half of the way from 4 to 14 is gone; the optimizer has taken none.
    assert schedule.rate(step=10, applied_steps=0) == pytest.approx(0.25 * 0.5)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"lr_schedule": "linear"}, "set it to the run's max_steps"),
        ({"lr_schedule": "cosine", "warmup_steps": 5, "lr_decay_steps": 5}, "lr_decay_steps above warmup_steps"),
        ({"lr_decay_steps": 5}, "need lr_schedule"),
        ({"lr_final_ratio": 0.1}, "need lr_schedule"),
        ({"lr_schedule": "step"}, "lr_schedule"),
    ],
)
def test_schedule_that_says_nothing_is_refused(table, words):
    with pytest.raises(ValidationError, match=words):
        TorchBackendConfig.model_validate(table)


def test_restored_learner_takes_the_next_step_with_the_size_that_the_killed_one_would_have(tmp_path):
    directory, saved = tmp_path / "model", tmp_path / "saved"
    tiny_model().save_pretrained(directory)
    saved.mkdir()
    config = TorchBackendConfig(lr=1e-3, warmup_steps=2, lr_schedule="cosine", lr_decay_steps=5, lr_final_ratio=0.1)

    def start():
        return TorchBackend(model_dir=directory, config=config, loss=GepoConfig(), sampling=SAMPLING)

    def rates(backend, steps):
        return [backend.train_step(random_groups(seed=step), head_version=step, step=step).lr for step in steps]

    backend = start()
    before = rates(backend, [1, 2, 3])
    backend.freeze(saved)()
    expected = rates(backend, [4, 5, 6])
    restored = start()
    restored.restore(saved)

    assert rates(restored, [4, 5, 6]) == expected
    assert before[1:] + expected == sorted(before[1:] + expected, reverse=True)
    assert expected[-1] == pytest.approx(1e-4)
