"""`heterorl view` of a real coordinator: as an operator, over certificates, from an empty ring to new samples."""

import asyncio
import contextlib
import http.cookiejar
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from heterorl.common.types.rollout import FinishReason, RewardPart
from heterorl.common.types.sample import EvaluationSample, RolloutNote, SampleNote, SampleRollout
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from tests.support.limits import WAIT_S
from tests.support.secure_run import SecureRun

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def viewing(*words):
    """The command, and a function that asks its page."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "BROWSER": "true"}
    process = await asyncio.create_subprocess_exec(
        # A shell that runs the tests beside other work has SIGINT ignored, which children inherit.
        "env", "--default-signal=INT", sys.executable, "-m", "heterorl", "view", *words,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    line = (await process.stdout.readline()).decode()
    found = re.match(r"(http://127\.0\.0\.1:\d+)/\?key=\S+", line)
    try:
        assert found, (await process.stderr.read()).decode()
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
        opener.addheaders = []

        def ask(path):
            with opener.open(found.group(1) + path, timeout=WAIT_S) as answer:
                return answer.read().decode()

        with opener.open(found.group(), timeout=WAIT_S):
            pass
        yield lambda path: asyncio.to_thread(ask, path)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 0


async def until(ask, path, wanted):
    """Ask until the answer is as wanted; the test's own time ends it."""
    while True:
        found = await ask(path)
        if wanted(found):
            return found
        await asyncio.to_thread(time.sleep, 0.1)


def evaluations(run, count, *, text="The answer is 42."):
    rollouts = (
        SampleRollout(
            completion=text, reward=1.0, reward_parts=(RewardPart(name="correct", value=1.0),),
            finish_reason=FinishReason.EOS,
        ),
    )  # fmt: skip
    return [
        EvaluationSample(version=run.run.head, site="", prompt_index=n, prompt=f"What is {n} + 1?", rollouts=rollouts)
        for n in range(count)
    ]


async def test_samples_of_a_coordinator_come_to_the_page_and_stay_when_it_is_gone(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        run = SecureRun(tmp_path)
        run.changes = {"max_message_bytes": 32 << 20}
        await stack.enter_async_context(run)
        words = ["--no-browser", "--credentials", str(run.certificates.node("operator", "eu-1"))]
        ask = await stack.enter_async_context(viewing(run.address, *words))
        await until(ask, "/", lambda page: "Nothing was kept yet" in page)

        await run.learner.note_samples(epoch=run.run.epoch, notes=(), evaluations=evaluations(run, 3))
        await until(ask, "/state.json", lambda state: json.loads(state)["read"] == 3)
        page = await ask("/?text=is+2+%2B+1")
        assert "1 sample<" in page
        assert "held-out" in page
        sample = re.search(r'href="(/sample/\d+)', page).group(1)
        assert "The answer is 42." in await ask(sample)
        # Larger than messages are by default.
        (large,) = evaluations(run, 1, text="x" * (17 << 20))
        await run.core.note_samples(epoch=run.run.epoch, notes=(), evaluations=[replace(large, prompt_index=3)])
        await until(ask, "/state.json", lambda state: json.loads(state)["read"] == 4)

        await run.core.end_streams()
        await run.server.stop(0.1)
        state = json.loads(await until(ask, "/state.json", lambda state: json.loads(state)["problem"]))
        assert state["samples"] == 4
        assert "The answer is 42." in await ask(sample)


def note(group):
    ratios, ends = np.array([-0.75, 0.0, 2.0], np.float32), np.array([2, 4, 5], np.int32)
    rollouts = tuple(
        RolloutNote(completion=text, reward_parts=(), log_ratios=ratios, token_ends=ends) for text in ("is 2.", "is 3.")
    )
    return SampleNote(group=group, prompt="1 + 1 =", rollouts=rollouts)


async def test_a_group_is_shown_with_what_the_learner_said_of_it(tmp_path):
    async with SecureRun(tmp_path) as run:
        # One of so many is kept as long as nobody asks for more.
        for _ in range(CoordinatorConfig(data_dir=tmp_path).samples_every // 2):
            consumed = await run.run.push(2)
            await run.run.publish(consumed=consumed)
            await run.learner.note_samples(epoch=run.run.epoch, notes=list(map(note, consumed)))
        words = ["--no-browser", "--credentials", str(run.certificates.node("operator", "eu-1"))]
        async with viewing(run.address, *words) as ask:
            await until(ask, "/state.json", lambda state: json.loads(state)["read"] == 1)

            page = await ask(re.search(r'href="(/sample/\d+)', await ask("/")).group(1))

        assert "trained on" in page
        # exp(-0.5) is 0.61.
        assert len(re.findall(r'class="n3 l1" data-n="5 -0.5 -0.75 \d+">is<', page)) == 2
        assert re.search(r'class="p4 l2" data-n="1 -1 2 \d+">\.<', page)


@pytest.mark.parametrize("role", ["sampler", "learner"])
async def test_others_than_operators_are_refused_in_words(tmp_path, role):
    async with SecureRun(tmp_path) as run:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "heterorl", "view", run.address, "--no-browser",
            "--credentials", str(run.certificates.node(role, "eu-1")),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
        out, err = await process.communicate()

    assert (process.returncode, out) == (2, b"")
    assert b"may not call" in err
    assert b"certificate of the right role" in err


def test_a_file_that_is_no_export_ends_in_one_line(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"id": 1}\n')
    result = subprocess.run(
        [sys.executable, "-m", "heterorl", "view", str(tmp_path / "x.jsonl")],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip

    assert (result.returncode, result.stdout) == (2, "")
    assert "row 1: index: Field required" in result.stderr
    assert len(result.stderr.splitlines()) == 1
