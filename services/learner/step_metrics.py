"""Records of a step and a version: times, metrics, log line, rows.

    writes   the training loop, its phases one after another; the backend's thread, its micro-batches
    reads    the renewal of the lease, at any time

A write is one assignment and never waits for a reader. Append-only files are for people and plots:

    versions.jsonl     {version, state_root, bytes, full_bytes, num_changed, num_elements, encode_s, publish_s}
    steps.jsonl        the fields of StepReport, not finite ones null; also rejected steps (is_applied false)
    evaluations.jsonl  {version, accuracy, num_prompts, num_completions, num_errors, seconds}

No decision depends on them; a start cuts off a torn last line. `bytes` is the size of the delta, or of the snapshot
where there is no delta. `encode_s` and `publish_s` are null in a row that a restart wrote. After versions were
abandoned, a later row of a step replaces an earlier one.
"""

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from heterorl.common.process import metrics
from heterorl.common.process.clock import Clock
from heterorl.common.process.files import BAD_ROW, cut_torn_line, make_directory
from heterorl.common.process.tracing import TRACER
from heterorl.common.types.common import (
    CompletionNumbers,
    LearnerPhase,
    LearnerProgress,
    StepReport,
    StepTimes,
    strict_json,
)
from heterorl.common.types.policy import NO_VERSION, Manifest, PayloadKind
from heterorl.common.types.rollout import QueuedGroup
from heterorl.common.types.run import EVALUATIONS_FILE, STEPS_FILE, VERSIONS_FILE


@dataclass(slots=True)
class PassCount:
    """Micro-batches of the current step: done, and in total."""

    counts: tuple[int, int] = (0, 0)

    def note(self, done: int, total: int) -> None:
        """Set both; called from the thread that computes."""
        self.counts = (done, total)
        metrics.STEP_PROGRESS.set(done / total if total else 0.0)


@dataclass(slots=True, kw_only=True)
class BusyTime:
    """Seconds in which at least one block was open.
    Blocks are on the event loop, or in threads that it waits for."""

    clock: Clock
    _num_open: int = 0
    _since: float = 0.0
    _total_s: float = 0.0

    def __enter__(self) -> None:
        if not self._num_open:
            self._since = self.clock.monotonic()
        self._num_open += 1

    def __exit__(self, *_: object) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._total_s += self.clock.monotonic() - self._since

    @property
    def is_busy(self) -> bool:
        return self._num_open > 0

    @property
    def seconds(self) -> float:
        return self._total_s + (self.clock.monotonic() - self._since if self.is_busy else 0.0)


@dataclass(slots=True, kw_only=True)
class StepTimer:
    """The phases of the trainer.

    `passes` is written by the backend, `checks` by the verifier.
    """

    clock: Clock
    passes: PassCount = field(default_factory=PassCount)
    step: int = 0
    """Steps taken."""
    checks: BusyTime = field(init=False)
    _spent_s: dict[LearnerPhase, float] = field(default_factory=dict)
    _phase: tuple[LearnerPhase, float] | None = None
    _period_began: float = 0.0

    def __post_init__(self) -> None:
        self.checks = BusyTime(clock=self.clock)

    def begin(self, step: int) -> None:
        """Start counting at a loop that continues after `step` steps."""
        self.step, self._spent_s, self._period_began = step, {}, self.clock.monotonic()

    @contextmanager
    def phase(self, phase: LearnerPhase) -> Iterator[None]:
        """Count the block's time in a phase; blocks do not nest."""
        began = self.clock.monotonic()
        self.passes.note(0, 0)
        self._phase = (phase, began)
        try:
            yield
        finally:
            self._phase = None
            self._spend(phase, self.clock.monotonic() - began)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block's time as checks while these ran, else as waiting."""
        began, checked_s = self.clock.monotonic(), self.checks.seconds
        self._phase = (LearnerPhase.WAITING, began)
        try:
            yield
        finally:
            self._phase = None
            waited_s = self.clock.monotonic() - began
            examining_s = min(waited_s, self.checks.seconds - checked_s)
            self._spend(LearnerPhase.EXAMINING, examining_s)
            self._spend(LearnerPhase.WAITING, waited_s - examining_s)

    def _spend(self, phase: LearnerPhase, seconds: float) -> None:
        self._spent_s[phase] = self._spent_s.get(phase, 0.0) + seconds
        metrics.PHASE_SECONDS.labels(phase.value).inc(seconds)

    def end_step(self, *, is_applied: bool) -> StepTimes:
        now = self.clock.monotonic()
        spent_s = {f"{phase.value}_s": self._spent_s.get(phase, 0.0) for phase in LearnerPhase}
        times = StepTimes(period_s=now - self._period_began, **spent_s)
        self.step += is_applied
        self._spent_s, self._period_began = {}, now
        return times

    @property
    def now(self) -> LearnerProgress | None:
        """The current progress; None between two phases."""
        current = self._phase
        if current is None:
            return None
        phase, began = current
        if phase is LearnerPhase.WAITING and self.checks.is_busy:
            phase = LearnerPhase.EXAMINING
        done, total = self.passes.counts
        return LearnerProgress(
            step=self.step + 1,
            phase=phase,
            phase_s=max(0.0, self.clock.monotonic() - began),
            micro_batches_done=done,
            micro_batches=total,
        )


_LOG = logging.getLogger(__name__)
_NONE: Mapping[str, float] = {}
_OF_REPORT = (
    (metrics.LOSS, "loss"), (metrics.REWARD, "reward_mean"), (metrics.SAMPLER_KL, "kl"), (metrics.ESS, "ess_fraction"),
    (metrics.IMPORTANCE_WEIGHT_VARIANCE, "iw_variance"), (metrics.CLIPPED_TERMS, "clip_fraction"),
    (metrics.BAD_ROLLOUTS_TRAINED, "mask_share_bad"), (metrics.KL_TOKEN_FRESH, "kl_token_fresh"),
    (metrics.ENTROPY, "entropy"), (metrics.GRAD_NORM, "grad_norm"), (metrics.LEARNING_RATE, "lr"),
)  # fmt: skip
_NUMBERS = (
    *(gauge for gauge, _ in _OF_REPORT), metrics.TRUNCATED_RATIO, metrics.EQUAL_REWARD_GROUPS,
    metrics.EVALUATION_ACCURACY, metrics.COMPRESSION_RATIO, metrics.CHANGED_RATIO,
)  # fmt: skip


def observe_step(
    report: StepReport,
    groups: Sequence[QueuedGroup],
    *,
    head_version: int,
    held_s: Sequence[float],
    metrics_of_loss: Mapping[str, float] = _NONE,
) -> None:
    """Export one step.

    `head_version` is the version that the step builds on, which may be under publication; staleness counts from it.
    `held_s` are seconds since each group arrived here; they are added to its age on arrival.
    """
    # A step without tokens has no gradient.
    metrics.STEPS.labels(str(report.is_applied).lower() if report.num_tokens else "empty").inc()
    metrics.STEP_SECONDS.observe(report.step_s)
    if report.is_applied:
        _observe_trained(report, groups, head_version=head_version, held_s=held_s)
    metrics.LAST_STEP_TIMESTAMP.set_to_current_time()
    for queued, held in zip(groups, held_s, strict=True):
        site = metrics.SITES.of(queued.group.id.site)
        metrics.POLICY_AGE_SECONDS.labels(site).observe(queued.policy_age_s + held)
        trace = queued.group.trace
        TRACER.add("inbox", trace=trace, lasted_s=held - report.step_s, ended_ago_s=report.step_s)
        TRACER.add(
            "train",
            trace=trace,
            lasted_s=report.step_s,
            attributes={
                "step": report.step,
                "staleness": head_version - queued.group.oldest_version,
                "is_applied": report.is_applied,
            },
        )
    for gauge, name in _OF_REPORT:
        value = getattr(report, name)
        gauge.set(math.nan if value is None else value)
    metrics.REPLACED_GROUPS.inc(report.num_replaced)
    metrics.LOSS_METRIC.clear()
    for name, value in metrics_of_loss.items():
        metrics.LOSS_METRIC.labels(name).set(value)
    if report.completions is not None:
        _observe_completions(report.completions)
    times = report.times
    _LOG.info(
        "step %d: loss %.4g, reward %.3f, staleness up to %d versions, %d tokens in %.2f s, after waiting %.2f s for"
        " groups, %.2f s for checks and %.2f s for publications",
        report.step,
        report.loss,
        report.reward_mean,
        report.staleness_max,
        report.num_tokens,
        report.step_s,
        *((times.waiting_s, times.examining_s, times.publishing_s) if times else (0.0, 0.0, 0.0)),
    )


def _observe_trained(
    report: StepReport, groups: Sequence[QueuedGroup], *, head_version: int, held_s: Sequence[float]
) -> None:
    """Export what a step that was applied has trained on."""
    metrics.TOKENS.inc(report.num_tokens)
    for queued, held in zip(groups, held_s, strict=True):
        site = metrics.SITES.of(queued.group.id.site)
        metrics.STALENESS_VERSIONS.labels(site).observe(head_version - queued.group.oldest_version)
        metrics.INBOX_SECONDS.observe(held)
    for source in report.sources:
        metrics.SOURCE_REWARD.labels(source.label).set(source.reward_mean)
        metrics.SOURCE_GROUPS.labels(source.label).inc(source.num_groups)
    for numbers in () if report.completions is None else report.completions.sites:
        metrics.SITE_TOKENS.labels(metrics.SITES.of(numbers.site)).inc(numbers.num_tokens)


def _observe_completions(numbers: CompletionNumbers) -> None:
    for stat in ("mean", "p95", "max", "high_reward", "low_reward"):
        length = getattr(numbers, f"length_{stat}")
        metrics.COMPLETION_TOKENS.labels(stat).set(math.nan if length is None else length)
    metrics.TRUNCATED_RATIO.set(numbers.truncated_fraction)
    metrics.EQUAL_REWARD_GROUPS.set(numbers.uniform_fraction)
    # Drop parts that no longer exist.
    metrics.REWARD_PART.clear()
    for part in numbers.reward_parts:
        metrics.REWARD_PART.labels(part.name).set(part.mean)


def observe_start() -> None:
    """Set times to now, numbers to NaN, and create counters.
    No alert is then misled before the first step."""
    metrics.LAST_STEP_TIMESTAMP.set_to_current_time()
    for gauge in _NUMBERS:
        gauge.set(math.nan)
    # A counter that appears with its first count shows no increase.
    for applied in ("true", "false"):
        metrics.STEPS.labels(applied)
    for phase in LearnerPhase:
        metrics.PHASE_SECONDS.labels(phase.value)
    for kind in ("delta", "snapshot"):
        metrics.VERSIONS.labels(kind)
    for outcome in ("sent", "given_up"):
        metrics.SAMPLE_NOTES.labels(outcome)


def observe_version(manifest: Manifest, *, encode_s: float, publish_s: float) -> None:
    """Export one published version."""
    metrics.LEARNER_VERSION.set(manifest.version)
    metrics.ENCODE_SECONDS.observe(encode_s)
    metrics.PUBLISH_SECONDS.observe(publish_s)
    metrics.FULL_BYTES.set(manifest.full_bytes)
    if manifest.num_elements:
        metrics.CHANGED_RATIO.set(manifest.num_changed / manifest.num_elements)
    for payload in manifest.payloads:
        metrics.VERSION_BYTES.labels(payload.kind.value).set(payload.num_bytes)
    kinds = {payload.kind for payload in manifest.payloads}
    metrics.VERSIONS.labels("delta" if PayloadKind.DELTA in kinds else "snapshot").inc()
    metrics.COMPRESSION_RATIO.set(manifest.full_bytes / min(payload.num_bytes for payload in manifest.payloads))


class TrainingLog:
    """Appends rows to the three files of a state directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        make_directory(directory)
        for name in (VERSIONS_FILE, STEPS_FILE, EVALUATIONS_FILE):
            if (directory / name).exists():
                cut_torn_line(directory / name)
        path = directory / VERSIONS_FILE
        lines = path.read_bytes().splitlines() if path.exists() else []
        self.last_version = NO_VERSION
        """Version of the last row; -1 for none or a damaged one."""
        try:
            self.last_version = int(json.loads(lines[-1])["version"]) if lines else NO_VERSION
        except BAD_ROW:
            _LOG.warning("training log %s has a damaged line, no weights depend on it: %.40r", path, lines[-1])

    def note_version(
        self,
        manifest: Manifest,
        reports: Sequence[StepReport],
        *,
        encode_s: float | None = None,
        publish_s: float | None = None,
    ) -> None:
        sizes = {payload.kind: payload.num_bytes for payload in manifest.payloads}
        row = {
            "version": manifest.version,
            "state_root": manifest.state_root,
            "bytes": sizes.get(PayloadKind.DELTA, sizes.get(PayloadKind.SNAPSHOT, 0)),
            "full_bytes": manifest.full_bytes,
            "num_changed": manifest.num_changed,
            "num_elements": manifest.num_elements,
            "encode_s": encode_s,
            "publish_s": publish_s,
        }
        self._append(VERSIONS_FILE, [row])
        self._append(STEPS_FILE, [dataclasses.asdict(report) for report in reports])
        self.last_version = manifest.version

    def note_rejected_step(self, report: StepReport) -> None:
        self._append(STEPS_FILE, [dataclasses.asdict(report)])

    def note_evaluation(self, row: Mapping[str, object]) -> None:
        self._append(EVALUATIONS_FILE, [row])

    def _append(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        path = self._directory / name
        try:
            with path.open("a", encoding="ascii") as file:
                file.writelines(strict_json(row) + "\n" for row in rows)
        except OSError as error:
            # The version is committed: an end would cost it where its checkpoint is not due.
            _LOG.warning("training log %s loses rows, no weights depend on it: %s", path, error)
            with contextlib.suppress(OSError):
                cut_torn_line(path)
