"""The versions that one can go back to, with what was measured of each."""

import asyncio
import dataclasses
import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from heterorl.cli.live.run_tables import Restorable, read_versions, versions_table
from heterorl.cli.main import app
from heterorl.common.errors import ConfigError
from heterorl.common.types.evaluation import Estimate
from tests.support.evaluations import evaluation
from tests.support.run import REPORT
from tests.support.secure_run import SecureRun

ACCURACY = {2: 0.25, 4: 0.75, 5: float("nan")}


class Coordinator:
    """Versions 1 to 5 of six, of which some were evaluated."""

    async def list_restorable(self):
        return (1, 2, 4, 5)

    async def list_steps(self, *, after_step, limit):
        steps = range(max(1, after_step + 1), 7)
        return tuple(
            dataclasses.replace(
                REPORT, step=step, version=step, reward_mean=step / 8, evaluation_accuracy=ACCURACY.get(step)
            )
            for step in steps
        )[:2]

    async def list_evaluations(self, *, task_set="", after_version=-1, limit=1000):
        means = {1: 0.5, 3: 0.9, 4: 0.4}
        found = [
            evaluation(version, task_set="gsm8k", average=Estimate(mean=mean, low=0.0, high=1.0, num_prompts=2))
            for version, mean in means.items()
        ]
        return tuple(each for each in found if each.version > after_version)


def test_results_stand_beside_each_version_and_the_best_is_marked():
    found = asyncio.run(read_versions(Coordinator()))

    assert [each.version for each in found] == [1, 2, 4, 5]
    assert found[2].held_out == {"held out, by the learner": 0.75, "gsm8k": 0.4}
    out = io.StringIO()
    Console(file=out, width=80).print(versions_table(found))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["\u2502", "4", "\u2502", "0.500", "\u2502", "0.750", "best", "\u2502", "0.400", "\u2502"] in lines
    assert ["\u2502", "1", "\u2502", "0.125", "\u2502", "-", "\u2502", "0.500", "best", "\u2502"] in lines


def test_command_lists_every_version(monkeypatch):
    found = tuple(Restorable(version=version) for version in range(101, 124))
    monkeypatch.setattr("heterorl.cli.connection.Link.ask", lambda *_: found)

    text = CliRunner().invoke(app, ["rollback", "127.0.0.1:1", "--insecure", "--list"]).stdout

    assert sum(f" {each.version} " in text for each in found) == 23


@pytest.mark.parametrize("options", [[], ["--to", "1", "--list"]])
def test_one_of_the_two_options_is_named(options):
    result = CliRunner().invoke(app, ["rollback", "127.0.0.1:1", "--insecure", *options])

    assert isinstance(result.exception, ConfigError)
    assert "--list shows the versions" in str(result.exception)


async def test_operator_lists_them_over_the_link(tmp_path):
    async with SecureRun(tmp_path) as secure:
        for _ in range(3):
            await secure.run.publish()
        listed = await secure.operator.list_restorable()

        assert listed == tuple(range(secure.run.head))


async def test_command_says_what_becomes_of_the_order(tmp_path):
    async with SecureRun(tmp_path) as secure:
        await secure.run.publish()
        options = ["--credentials", str(secure.certificates.node("operator", "eu-1")), "--to"]

        async def said(version):
            words = ["rollback", secure.address, *options, version]
            return (await asyncio.to_thread(CliRunner().invoke, app, words)).stdout

        assert await said("-1") == "no order is open; the run is at version 1\n"
        assert await said("0") == "the learner goes back to version 0 at its next step; the run is at version 1\n"
        assert await said("-1") == "the order is cancelled; the run is at version 1\n"
        await secure.learner.drain(reason="step 1 of 1", epoch=secure.run.epoch)
        await secure.learner.release_lease(epoch=secure.run.epoch)
        assert (await said("0")).startswith("the run is complete and has no learner: one that starts goes back to")
