"""The checks of a group, with real rollouts of the real engine, and with everything that a site may do to them."""

import dataclasses
import functools
import random
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.verify import build_site
from benchmarks.verify_cheats import SEED
from heterorl.common.errors import PromptRefused, RewardError, UnknownPayload, UnknownVersion
from heterorl.common.generation.hf_engine import HfEngine
from heterorl.common.generation.tiny_model import write_tiny_model
from heterorl.common.model import tensors
from heterorl.common.model.contract import LoraConfig
from heterorl.common.model.logprobs import group_key
from heterorl.common.process.backoff import Backoff
from heterorl.common.tasks.rewards.function_reward import FunctionReward, FunctionRewardTask
from heterorl.common.types.rollout import (
    GIVEN,
    DropReason,
    FinishReason,
    GroupId,
    QueuedGroup,
    Rejection,
    RewardPart,
    Span,
)
from heterorl.common.weights.arena import Arena
from heterorl.coordinator.coordinator_config import CoordinatorConfig
from heterorl.coordinator.groups.schedule import seed_of
from heterorl.learner.checks.findings import (
    Replay,
    VerificationConfig,
    checked_share,
    judge_logprobs,
    judge_margins,
    logprob_difference,
)
from heterorl.learner.checks.replay import Replayer
from heterorl.learner.checks.reward_checks import judge_rewards
from heterorl.learner.checks.verifier import Limits, VerificationContext, Verifier
from heterorl.learner.run.inbox import Inbox, feed
from heterorl.learner.sample_notes import SampleNotes
from heterorl.learner.train.batch import collate
from tests.support.clock import ManualClock

ALWAYS = {"logprob_floor": 1.0}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    model_dir = write_tiny_model(tmp_path_factory.mktemp("model"), seed=0, hidden_size=32, num_layers=1)
    return build_site(str(model_dir), digits=1, group_size=4)[0]


@pytest.fixture(scope="module")
def honest(site):
    return site.generate(site.engine(), range(6))


class Versions:
    """Stands for the coordinator's versions: number 0 is the site's; counts what it was asked."""

    def __init__(self, arena, known=(0,)):
        self._arena, self._known, self.asked = arena, known, []

    async def get(self, version, variant=""):
        self.asked.append((version, variant) if variant else version)
        if version not in self._known:
            raise UnknownVersion(f"version {version} is gone")
        return self._arena


def verifier_of(site, *, rng=None, versions=None, **settings):
    verification = VerificationContext(
        config=VerificationConfig(**settings), task=site.task, prompter=site.prompter, replayer=site.replayer
    )
    return Verifier(
        verification=verification, versions=versions or Versions(arena_of(site)), rng=rng or random.Random(0)
    )


@functools.cache
def arena_of(site):
    engine = site.engine()
    arena = Arena(engine.layout)
    tensors.store(engine.model, arena)
    return arena


def queued(group, **changes):
    values = {"policy_age_s": 0.0, "queue_age_s": 0.0, "seed": seed_of(group.assignment, seed=SEED)}
    return QueuedGroup(group=group, **{**values, **changes})


def with_rollout(group, number=0, **changes):
    rollouts = list(group.rollouts)
    rollouts[number] = dataclasses.replace(rollouts[number], **changes)
    return dataclasses.replace(group, rollouts=tuple(rollouts))


async def examined(verifier, asked):
    return await verifier.conclude(asked, await verifier.score(asked))


async def examine(site, group, *, seed=..., **settings):
    verifier = verifier_of(site, versions=Versions(arena_of(site)), **{**ALWAYS, **settings})
    return await examined(verifier, queued(group) if seed is ... else queued(group, seed=seed))


async def test_honest_groups_pass_every_check(site, honest):
    for group in honest:
        assert await examine(site, group, require_seeded=True) == await examine(site, group)
        assert (await examine(site, group)).reason is None


async def test_group_of_an_engine_in_bf16_passes_where_bf16_alone_gives_its_log_probs(site):
    (group,) = site.generate(site.engine(compute_dtype="bf16"), [0])
    stated = [rollout.sampler_logprobs for rollout in group.rollouts]
    off, off_in_bf16 = (
        max(
            map(
                logprob_difference,
                stated,
                [each.logprobs for each in site.replayer.replay(group, key=None, is_rounded=wanted)],
            )
        )
        for wanted in (False, True)
    )
    assert off_in_bf16 < off / 2
    tight = {"logprob_tolerance": off / 2, "group_logprob_tolerance": off / 2}

    assert (await examine(site, group, **tight)).is_sound
    forged = with_rollout(group, 0, sampler_logprobs=stated[0] - np.float32(off))
    assert (await examine(site, forged, **tight)).reason is DropReason.LOGPROB_MISMATCH
    # The model is in fp32 again.
    (exact,) = site.generate(site.engine(), [1])
    assert (await examine(site, exact, logprob_tolerance=1e-5, group_logprob_tolerance=1e-5)).is_sound


async def test_forged_reward_is_named_with_both_values(site, honest):
    forged = with_rollout(honest[0], 2, reward=0.75)

    finding = await examine(site, forged)

    assert finding.reason is DropReason.REWARD_MISMATCH
    assert finding.detail.startswith("rollouts[2].reward: 0.75, computed ")
    assert (await examine(site, forged, recompute_rewards=False)).reason is None


async def test_a_prompt_without_environment_has_one_drawn_turn(site, honest):
    """A mixture's contract allows turns: a site gave itself the right answer, and it was scored."""
    group, own = honest[0], honest[0].rollouts[0]
    answer, end = site.prompter.tokens(site.task.prompt(group.prompt_index).answer), own.token_ids[-1:]
    size, whole = own.token_ids.size, np.concatenate([own.token_ids, answer, end])
    version = own.spans[0].version
    spans = (
        Span(version=version, start=0, end=size), Span(version=GIVEN, start=size, end=whole.size - 1),
        Span(version=version, start=whole.size - 1, end=whole.size),
    )  # fmt: skip
    logprobs = np.append(own.sampler_logprobs, np.float32(-1.0))
    for changes, words in (
        ({"token_ids": whole, "spans": spans, "sampler_logprobs": logprobs, "reward": 1.0}, "it has given tokens"),
        ({"finish_reason": FinishReason.TURNS}, "finish_reason is turns"),
    ):
        finding = await examine(site, with_rollout(group, 0, **changes))
        assert finding.reason is DropReason.REWARD_MISMATCH
        assert words in finding.detail


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e300])
def test_reward_that_is_no_number_never_passes(site, honest, reward):
    forged = with_rollout(honest[0], reward=reward)

    assert not judge_rewards(forged, task=site.task, prompter=site.prompter, tolerance=1e-6).is_sound


def test_parts_of_a_reward_and_its_prompt_are_those_of_the_task(site, honest):
    def finding(group):
        return judge_rewards(group, task=site.task, prompter=site.prompter, tolerance=1e-6)

    own = honest[0].rollouts[0].reward_parts[0]
    for forged in (RewardPart(name="x", value=own.value), dataclasses.replace(own, weight=2.0)):
        assert (
            "rollouts[0].reward_parts: not 1 x correct in"
            in finding(with_rollout(honest[0], reward_parts=(forged,))).detail
        )
    forged = dataclasses.replace(own, value=9.0)
    assert "correct is 9, computed" in finding(with_rollout(honest[0], reward_parts=(forged,))).detail
    # Of a program that states none.
    assert finding(with_rollout(honest[0], reward_parts=())).is_sound
    other = honest[0].prompt_token_ids.copy()
    other[0] = (other[0] + 1) % 10 + 2
    assert "prompt_token_ids" in finding(dataclasses.replace(honest[0], prompt_token_ids=other)).detail
    assert "the task has" in finding(dataclasses.replace(honest[0], prompt_index=10**9)).detail


async def test_verifier_that_fails_blames_nobody(site, honest, monkeypatch):
    def broken(*_):
        raise RewardError("the verifier timed out")

    monkeypatch.setattr(site.task, "score", broken, raising=False)
    finding = await examine(site, honest[0])

    assert (finding.reason, "timed out" in finding.detail) == (None, True)


async def test_row_that_the_template_refuses_blames_nobody_and_ends_no_learner(site, honest):
    class Refusing:
        def encode_prompt(self, prompt):
            raise PromptRefused("use_chat_template", "the model's template refuses messages of user, user")

    verifier = verifier_of(site)
    verifier.verification = dataclasses.replace(verifier.verification, prompter=Refusing())
    finding = await examined(verifier, queued(honest[0]))

    assert (finding.reason, "refuses messages" in finding.detail) == (None, True)


@pytest.mark.process
@pytest.mark.slow
async def test_a_reward_that_hangs_delays_one_group_and_no_other(site, honest, tmp_path, caplog):
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "def score(prompt, completion, answer):\n"
        f"    if prompt == {site.task.prompt(honest[0].prompt_index).text!r}:\n        time.sleep(1000)\n"
        "    return {'correct': float(completion.strip() == answer)}\n"
    )
    reward = FunctionReward("mine:score", directory=tmp_path, timeout_s=600.0)
    verifier = verifier_of(site)
    verifier.verification = dataclasses.replace(verifier.verification, task=FunctionRewardTask(site.task, reward))

    findings = []
    for group in (*honest, *[honest[0]] * 9):
        # Only what hangs comes to its limit, however slow the machine is.
        reward.pool.workers[0].timeout_s = 0.5 if group is honest[0] else 600.0
        findings.append(await examined(verifier, queued(group)))

    assert "no answer in 0.5 s" in findings[0].detail
    assert findings[0].reason is None
    assert [finding for finding in findings[1 : len(honest)] if finding.detail or finding.reason] == []
    assert "NO REWARD for 8 groups in a row" in caplog.text


@pytest.mark.parametrize("shift", [-0.1, 0.12])
async def test_forged_logprobs_are_found(site, honest, shift):
    logprobs = honest[0].rollouts[1].sampler_logprobs + np.float32(shift)

    finding = await examine(site, with_rollout(honest[0], 1, sampler_logprobs=logprobs))

    assert finding.reason is DropReason.LOGPROB_MISMATCH
    assert finding.detail.startswith("rollouts[1]: log-probs are ")


async def test_draws_of_another_seed_are_found_and_cannot_be_where_the_site_does_not_repeat_them(site, honest):
    picked = site.generate(site.engine(), [group.assignment for group in honest], seed=SEED + 1)
    (changed,) = [
        group
        for group, own in zip(picked, honest, strict=True)
        if any(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(group.rollouts, own.rollouts, strict=True))
    ][:1]

    finding = await examine(site, changed)
    assert finding.reason is DropReason.SAMPLING_MISMATCH
    assert "are not what the seed draws" in finding.detail
    # The weights that a site names give it no other draws, of which it could choose.
    assert (await examine(site, dataclasses.replace(honest[0], state_root="b" * 64))).reason is None
    # Only log-probs are left where a site does not draw by name, or its seed is not told.
    unseeded = dataclasses.replace(changed, is_seeded=False)
    assert (await examine(site, unseeded)).reason is None
    assert (await examine(site, changed, seed=None)).reason is None
    # So an operator who follows the page has such groups rejected.
    page = (Path(__file__).parents[4] / "docs/untrusted.md").read_text(encoding="utf-8")
    example = tomllib.loads(page.split("```toml\n")[1].split("```")[0])
    finding = await examine(site, unseeded, **example["verification"])
    assert finding.reason is DropReason.SAMPLING_MISMATCH


async def test_tokens_are_judged_under_the_version_that_each_names(site, honest):
    versions = Versions(arena_of(site), known=(0, 1))
    verifier = verifier_of(site, versions=versions, **ALWAYS)
    group = max(honest, key=lambda group: group.rollouts[0].token_ids.size)
    length = group.rollouts[0].token_ids.size
    assert length > 1
    spans = (Span(version=0, start=0, end=1), Span(version=1, start=1, end=length))
    mixed = with_rollout(group, spans=spans)

    # Both versions have the same weights here, so an honest mixture passes, and both were asked for.
    assert (await examined(verifier, queued(mixed))).reason is None
    assert versions.asked == [0, 1]
    forged = group.rollouts[0].sampler_logprobs.copy()
    forged[-1] -= 1.0
    finding = await examined(verifier, queued(with_rollout(mixed, spans=spans, sampler_logprobs=forged)))
    assert finding.reason is DropReason.LOGPROB_MISMATCH


async def test_site_of_a_variant_is_judged_by_the_weights_of_its_variant(site, honest):
    versions = Versions(arena_of(site))
    await examined(verifier_of(site, versions=versions, **ALWAYS), queued(honest[0], variant="int8"))
    assert versions.asked == [(0, "int8")]


async def test_forms_of_one_version_are_not_taken_for_each_other(site, honest):
    class Forms:
        async def get(self, version, variant=""):
            arena = arena_of(site).copy()
            if variant:
                # Other weights, near enough to be numbers: the top bit of each mantissa.
                arena.chunk(0)[:] ^= 1 << 6
            return arena

    verifier = verifier_of(site, versions=Forms(), **ALWAYS)

    assert (await examined(verifier, queued(honest[0]))).reason is None
    finding = await examined(verifier, queued(honest[0], variant="int8"))
    assert finding.reason is DropReason.LOGPROB_MISMATCH
    assert (await examined(verifier, queued(honest[0]))).reason is None


@pytest.mark.parametrize("error", [UnknownVersion("version 0 is gone"), UnknownPayload("it went meanwhile")])
async def test_group_of_a_version_that_is_gone_is_given_up_without_blame(site, honest, error):
    class Gone:
        async def get(self, version, variant=""):
            raise error

    verifier = verifier_of(site, versions=Gone(), **ALWAYS)

    finding = await examined(verifier, queued(honest[0]))

    assert (finding.reason, "version 0 cannot be had" in finding.detail) == (None, True)
    assert verifier.passed[honest[0].id.site] == 0


def test_share_of_checks_falls_to_the_floor_and_no_further():
    config = VerificationConfig(logprob_floor=0.05, full_groups=10)

    assert [checked_share(count, config) for count in (0, 9, 10, 19, 20, 40, 50, 10**6)] == [
        1.0, 1.0, 0.5, 0.5, 0.25, 0.0625, 0.05, 0.05,
    ]  # fmt: skip
    assert checked_share(0, VerificationConfig()) == 0.0


async def test_trusted_site_is_checked_rarely_until_it_fails(site, honest):
    versions = Versions(arena_of(site))
    verifier = verifier_of(site, versions=versions, rng=random.Random(3), logprob_floor=0.05, full_groups=4)
    me = honest[0].id.site
    verifier.passed[me] = 10_000
    for _ in range(200):
        assert (await examined(verifier, queued(honest[0]))).reason is None
    # 200 draws at 5 %: 10 expected, 5 standard deviations are 15.
    assert 0 < len(versions.asked) < 26

    bad = with_rollout(honest[0], reward=0.5)
    assert (await examined(verifier, queued(bad))).reason is DropReason.REWARD_MISMATCH
    versions.asked.clear()
    for _ in range(4):
        await examined(verifier, queued(honest[0]))
    assert versions.asked == [0] * 4


async def test_site_whose_drawn_group_names_a_deleted_version_is_checked_at_every_group_again(site, honest):
    versions = Versions(arena_of(site), known=())
    verifier = verifier_of(site, versions=versions, rng=random.Random(3), logprob_floor=0.05, full_groups=4)
    verifier.passed[honest[0].id.site] = 10_000
    escaped = 0
    while not versions.asked:
        finding = await examined(verifier, queued(honest[0]))
        escaped += finding.is_sound
    assert finding.reason is None
    assert escaped < 100

    for _ in range(10):
        assert not (await examined(verifier, queued(honest[0]))).is_sound


def test_numbers_that_are_none_never_pass():
    nan = np.full(3, np.nan, np.float32)
    good = np.zeros(3, np.float32)

    assert not judge_logprobs([nan], [Replay(logprobs=good, margins=None)], VerificationConfig()).is_sound
    assert not judge_logprobs([good], [Replay(logprobs=nan, margins=None)], VerificationConfig()).is_sound
    assert not judge_margins([Replay(logprobs=good, margins=nan)], VerificationConfig()).is_sound


def test_small_differences_in_all_rollouts_are_found_in_the_group_as_a_whole():
    stated = [np.full(5, -1.0, np.float32)] * 4

    def off(*by):
        return [
            Replay(logprobs=entry - np.float32(shift), margins=None) for entry, shift in zip(stated, by, strict=True)
        ]

    config = VerificationConfig(logprob_tolerance=0.08, group_logprob_tolerance=0.03)
    assert judge_logprobs(stated, off(0.07, 0.0, 0.0, 0.0), config).is_sound
    assert judge_logprobs(stated, off(0.04, 0.04, 0.04, 0.04), config).detail.startswith(
        "rollouts: log-probs are 0.04 nats"
    )
    assert judge_logprobs(stated, off(0.09, 0.0, 0.0, 0.0), config).detail.startswith("rollouts[0]")


def test_one_token_of_a_hundred_may_differ_by_little_and_two_may_not():
    def finding(*margins):
        values = np.zeros(100, np.float32)
        values[: len(margins)] = margins
        return judge_margins([Replay(logprobs=values, margins=values)], VerificationConfig())

    assert finding(3.9).is_sound
    assert finding(3.9, 3.9).detail.startswith("rollouts[0]: 2.0% of the tokens")
    # One forced token, such as a wrong answer's first digit.
    assert finding(4.1).detail.startswith("rollouts[0]: 1.0% of the tokens")


async def test_lost_members_are_not_replayed_and_make_no_other_member_look_better(site, honest):
    group = honest[0]
    # Each member within its own bound, all together beyond that of the group; two lost ones would halve the mean.
    off = [rollout.sampler_logprobs - np.float32(0.06) for rollout in group.rollouts]
    for number in range(2):
        group = with_rollout(group, number, finish_reason=FinishReason.ENGINE_FAILED)
        group = with_rollout(group, number + 2, sampler_logprobs=off[number + 2])

    replays = site.replayer.replay(group, key=None)
    finding = await examine(site, group, recompute_rewards=False)

    assert [replay.logprobs.size > 0 for replay in replays] == [False, False, True, True]
    assert finding.detail.startswith("rollouts: log-probs are 0.06")
    worse = with_rollout(group, 3, sampler_logprobs=off[3] - np.float32(1.0))
    assert (await examine(site, worse, recompute_rewards=False)).detail.startswith("rollouts[3]: log-probs")


def test_no_pass_of_a_replay_has_more_tokens_than_it_may(site, honest, monkeypatch):
    group = honest[0]
    first = group.rollouts[0]
    # Two sequences, each of one drawn token, beside a rollout that is one long sequence.
    short = dataclasses.replace(
        first, token_ids=first.token_ids[[0, 0, 0]], sampler_logprobs=first.sampler_logprobs[[0, 0]],
        spans=(Span(version=0, start=0, end=1), Span(version=GIVEN, start=1, end=2, keeps=1),
               Span(version=0, start=2, end=3)),
    )  # fmt: skip
    long = dataclasses.replace(
        first, token_ids=np.full(40, first.token_ids[0], np.int32), sampler_logprobs=np.full(40, -1.0, np.float32),
        spans=(Span(version=0, start=0, end=40),),
    )  # fmt: skip
    group = dataclasses.replace(group, rollouts=(short, long, short, short))
    width = group.prompt_token_ids.size + 39
    passes = []
    monkeypatch.setattr("heterorl.learner.checks.replay.MAX_PASS_TOKENS", 4 * width)
    monkeypatch.setattr(
        "heterorl.learner.checks.replay.collate", lambda *a, **k: passes.append(collate(*a, **k)) or passes[-1]
    )

    found = site.replayer.replay(group, key=None)

    assert max(batch.input_ids_RS.numel() for batch in passes) <= 4 * width
    assert [one.logprobs.size for one in found] == [2, 40, 2, 2]
    for one in found[2:]:
        np.testing.assert_allclose(one.logprobs, found[0].logprobs, rtol=1e-4, atol=1e-5)


class Stream:
    """A coordinator's stream of groups that ends the inbox, and what the feed answers."""

    def __init__(self, groups, inbox):
        self._groups, self._inbox = groups, inbox
        self.rejected, self.abandoned = [], []

    async def stream_groups(self, *, epoch, held, credits):
        for group in self._groups:
            yield queued(group)
        await self._inbox.close()

    async def reject_groups(self, *, epoch, rejections):
        self.rejected += rejections

    async def abandon_groups(self, *, epoch, ids, reason):
        self.abandoned += ids


async def test_feed_lets_only_sound_groups_in(site, honest):
    groups = [
        dataclasses.replace(group, id=GroupId(site=group.id.site, incarnation="i", sequence=number))
        for number, group in enumerate(honest[:4], 1)
    ]
    groups[1] = with_rollout(groups[1], reward=0.25)
    groups[2] = with_rollout(groups[2], spans=(Span(version=9, start=0, end=99),))
    inbox = Inbox(8)
    api = Stream(groups, inbox)
    verifier = verifier_of(site, versions=Versions(arena_of(site)), **ALWAYS)

    await feed(
        api, inbox, epoch=1, limits=Limits(group_size=4, vocab_size=100, max_sequence_tokens=0),
        backoff=Backoff(clock=ManualClock(), rng=random.Random(0), base_s=1.0, cap_s=1.0), verifier=verifier,
        notes=SampleNotes(),
    )  # fmt: skip

    assert [group_id.sequence for group_id in inbox.held] == [1, 4]
    (rejected,) = api.rejected
    assert isinstance(rejected, Rejection)
    assert (rejected.id.sequence, rejected.reason) == (2, DropReason.REWARD_MISMATCH)
    assert [group_id.sequence for group_id in api.abandoned] == [3]


def test_versions_of_adapters_are_replayed_like_those_of_whole_models(site, tmp_path):
    engine = HfEngine(
        model_dir=site.model_dir, published_dtype="fp32", compute_dtype="fp32", device="cpu", sampling=site.sampling,
        batch_rows=8, end_token_ids=site.prompter.end_token_ids, lora=LoraConfig(rank=2, alpha=8.0), is_seeded=True,
    )  # fmt: skip
    arena = Arena(engine.layout)
    for name, parameter in engine.model.named_parameters():
        # B is 0 in version 0, where adapters change nothing and a replay without them would pass.
        if name.rpartition(".")[2] == "lora_b":
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    tensors.store(engine.model, arena)
    engine.load(arena, 1)
    replayer = Replayer(
        model_dir=site.model_dir, device="cpu", sampling=site.sampling, lora=engine.lora, published_dtype="fp32"
    )
    replayer.load(arena, 1)
    (group,) = site.generate(engine, [3])
    key = group_key(seed=seed_of(3, seed=SEED), prompt_index=group.prompt_index)

    for rollout, replay in zip(group.rollouts, replayer.replay(group, key=key), strict=True):
        np.testing.assert_allclose(replay.logprobs, rollout.sampler_logprobs, atol=1e-4)
        assert replay.margins.max() < 1e-3
    base = site.replayer.replay(group, key=key)
    assert any(np.abs(replay.logprobs - rollout.sampler_logprobs).max() > 1e-2
               for rollout, replay in zip(group.rollouts, base, strict=True))  # fmt: skip


async def test_group_that_names_too_many_versions_is_never_trained_on_nor_held_against_its_site(site, honest):
    """Each version costs a pull and a forward pass, and a site may name one for every token."""
    first = honest[0].rollouts[0]
    spans = (
        dataclasses.replace(first.spans[0], end=1),
        dataclasses.replace(first.spans[0], start=1, version=first.spans[0].version + 1),
    )
    mixed = with_rollout(honest[0], 0, spans=spans)
    versions = Versions(arena_of(site))

    # Of a site that is trusted, only one group in twenty is drawn.
    for num_passed, floor in ((0, 1.0), (10_000, 0.05)):
        verifier = verifier_of(site, versions=versions, rng=random.Random(0), logprob_floor=floor, max_versions=1)
        verifier.passed[mixed.id.site] = num_passed
        finding = await examined(verifier, queued(mixed))
        assert finding.reason is None
        assert "verification.max_versions" in finding.detail
    assert versions.asked == []
    assert VerificationConfig().max_versions == CoordinatorConfig.model_fields["max_staleness_versions"].default + 1
