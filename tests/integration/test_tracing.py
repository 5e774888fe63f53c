"""One trace follows a group from its generation over a real link through the queue into a step."""

import dataclasses
import random

import numpy as np
import pytest

from heterorl.common.errors import ConfigError, DependencyMissing
from heterorl.common.generation.inference_engine import Completion
from heterorl.common.process import tracing
from heterorl.common.process.clock import Bell, SystemClock
from heterorl.common.process.tracing import NO_TRACE, TRACER, Tracer, TracingConfig, well_formed
from heterorl.common.tasks.task import Prompt
from heterorl.common.types.common import Digest, SiteId
from heterorl.common.types.rollout import FinishReason, RewardPart, Span
from heterorl.common.wire.common_messages import bytes_digest
from heterorl.common.wire.sealed_groups import open_group, seal
from heterorl.learner.step_metrics import observe_step
from heterorl.sampler.outbox.delivery import Delivery
from heterorl.sampler.outbox.outbox import Outbox
from heterorl.sampler.rollout.group_builder import GroupBuilder
from tests.support.plain_task import PlainTask
from tests.support.run import INCARNATION, REPORT, SITE, credits_of
from tests.support.secure_run import SecureRun

CONTEXT = f"00-{'a1' * 16}-{'b2' * 8}-01"


COMPLETION = Completion(
    token_ids=np.array([5, 6, 1], np.int32), logprobs=np.array([-0.5, -0.25, -1.0], np.float32),
    spans=(Span(version=0, start=0, end=3),), finish_reason=FinishReason.EOS,
)  # fmt: skip


class Words:
    def encode_prompt(self, prompt):
        return np.array([2, 3], np.int32)

    def decode(self, token_ids):
        return "x"

    def completion(self, token_ids, prompt=None):
        return self.decode(token_ids)


class FreeTask(PlainTask):
    def prompt(self, index):
        return Prompt(index=index, text="secret words", answer="")

    def score(self, prompt, completion):
        return (RewardPart(name="right", value=1.0),)


def made(work, state_root):
    """The group of an assignment, all of whose completions are the same."""
    maker = GroupBuilder(
        task=FreeTask(), prompter=Words(), site=SiteId(SITE), incarnation=INCARNATION, group_size=2, clock=SystemClock()
    )
    (draft,), _ = maker.begin([work])
    draft.completions.update(dict.fromkeys(range(2), COMPLETION))
    draft.scores.update(enumerate(maker.score_all(draft.prompt, [COMPLETION] * 2)))
    draft.ended_at = draft.begun_at
    group = maker.group(draft, state_roots={0: state_root})
    return dataclasses.replace(group, id=dataclasses.replace(group.id, sequence=1))


@pytest.fixture
def spans():
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    TRACER.use(provider.get_tracer("test"))
    yield exporter
    TRACER.use(None)
    provider.shutdown()


async def travel(tmp_path):
    """A group made by a sampler, delivered, queued, leased and trained, over certificates and a socket."""
    async with SecureRun(tmp_path) as secure:
        (work,) = await secure.run.lease()
        group = made(work, secure.run.roots[0])
        outbox = Outbox(tmp_path / "outbox")
        outbox.put([group], release=[0.0])
        delivery = Delivery(api=secure.sampler, outbox=outbox, clock=SystemClock(), bell=Bell(), rng=random.Random(0))
        # Spooled and read again, as after a restart.
        await delivery._push(outbox.due(1.0, limit=1, max_bytes=1 << 20)[0])
        outbox.close()
        stream = secure.learner.stream_groups(epoch=secure.run.epoch, held=(), credits=credits_of(1))
        queued = await anext(stream)
        await stream.aclose()
        observe_step(REPORT, [queued], head_version=3, held_s=[0.5])
        return queued


async def test_one_trace_follows_a_group_across_the_sites(spans, tmp_path):
    queued = await travel(tmp_path)

    made = {span.name: span for span in spans.get_finished_spans()}
    assert set(made) == {"generate", "push", "queue", "inbox", "train"}
    assert len({span.context.trace_id for span in made.values()}) == 1
    root = made.pop("generate")
    assert root.parent is None
    assert {span.parent.span_id for span in made.values()} == {root.context.span_id}
    assert queued.group.trace == f"00-{root.context.trace_id:032x}-{root.context.span_id:016x}-01"
    assert dict(root.attributes) == {"heterorl.site": SITE, "heterorl.assignment": 0, "heterorl.version": 0}
    assert made["push"].attributes["heterorl.status"] == "accepted"
    assert dict(made["train"].attributes) == {
        "heterorl.step": 1, "heterorl.staleness": 3, "heterorl.is_applied": True
    }  # fmt: skip
    # The step took 0.1 of the 0.5 seconds that the learner had the group.
    length = {name: (span.end_time - span.start_time) / 1e9 for name, span in made.items()}
    assert length["train"] == pytest.approx(0.1, abs=1e-6)
    assert length["inbox"] == pytest.approx(0.4, abs=1e-6)
    assert made["inbox"].end_time == pytest.approx(made["train"].start_time, abs=50e6)
    assert "secret" not in repr([span.to_json() for span in spans.get_finished_spans()])


async def test_without_an_endpoint_groups_carry_nothing(tmp_path):
    assert not TRACER.is_on
    queued = await travel(tmp_path)

    assert queued.group.trace == NO_TRACE


def test_groups_that_the_sampler_does_not_follow_are_followed_by_nobody(spans):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    tracer = Tracer()
    tracer.use(TracerProvider(sampler=ParentBasedTraceIdRatio(0.0)).get_tracer("t"))

    assert tracer.begin("generate", lasted_s=1.0, attributes={}) == NO_TRACE
    TRACER.add("queue", trace=NO_TRACE, lasted_s=1.0)
    assert spans.get_finished_spans() == ()


@pytest.mark.parametrize(
    "text",
    ["", "x", CONTEXT[:-1], CONTEXT + "0", CONTEXT.upper(), CONTEXT.replace("a1", "00"), CONTEXT.replace("b2", "00"),
     CONTEXT.replace("00-", "ff-", 1), f"{CONTEXT}\n"],
)  # fmt: skip
def test_context_that_is_not_well_formed_counts_as_none(text, spans):
    TRACER.add("queue", trace=text, lasted_s=1.0)

    assert well_formed(text) == NO_TRACE
    assert spans.get_finished_spans() == ()


def test_context_is_part_of_a_groups_bytes_and_checked_when_they_are_read():
    work = dataclasses.make_dataclass("Work", ["id", "prompt_index", "seed"])(1, 2, 3)
    group = made(work, Digest("0" * 64))
    followed = dataclasses.replace(group, trace=CONTEXT)

    assert open_group(seal(followed)).trace == CONTEXT
    assert open_group(seal(dataclasses.replace(group, trace="evil"))).trace == NO_TRACE
    assert bytes_digest(seal(group).data) != bytes_digest(seal(followed).data)


def test_endpoint_is_checked_and_the_extra_is_named(monkeypatch):
    tracing.start(TracingConfig(), service="sampler", name="a")
    assert not TRACER.is_on
    with pytest.raises(ConfigError, match="loopback"):
        tracing.start(TracingConfig(otlp_endpoint="http://10.0.0.1:4317"), service="sampler", name="a")
    with pytest.raises(ValueError, match="otlp_endpoint"):
        TracingConfig(otlp_endpoint="10.0.0.1:4317")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(DependencyMissing, match="otel"):
        tracing.start(TracingConfig(otlp_endpoint="http://127.0.0.1:4317"), service="sampler", name="a")
