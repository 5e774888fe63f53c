"""Protobuf <-> domain values is lossless for every value."""

import dataclasses
import json
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterorl.common.errors import InvalidRequest, MalformedPayload
from heterorl.common.types.common import (
    NO_LORA,
    CompletionNumbers,
    Contract,
    LearnerPhase,
    LearnerProgress,
    LogprobMode,
    LoraSettings,
    PartMean,
    SamplingSemantics,
    SiteTokens,
    StepReport,
    StepTimes,
    digest_field,
    value_of_row,
)
from heterorl.common.types.evaluation import (
    Estimate,
    Evaluation,
    EvaluationDraws,
    EvaluationSpec,
    EvaluationState,
    EvaluationSummary,
    PassEstimate,
)
from heterorl.common.types.policy import (
    Manifest,
    PayloadKind,
    PayloadRef,
    PlanKind,
    PublishRequest,
    PullPlan,
    VariantVersion,
)
from heterorl.common.types.rollout import (
    DropReason,
    GroupId,
    LeasedGroup,
    PushOutcome,
    PushStatus,
    QueuedGroup,
    WorkAssignment,
    WorkGrant,
)
from heterorl.common.types.run import (
    CanaryReport,
    CanaryVerdict,
    Command,
    Heartbeat,
    LedgerCounts,
    PromptCounts,
    RegisterAnswer,
    Registration,
    RunStatus,
    SiteStatus,
    VariantStatus,
)
from heterorl.common.wire.common_messages import (
    contract_from_bytes,
    contract_from_pb,
    contract_to_bytes,
    new_message,
    progress_from_pb,
    to_message,
    to_value,
)
from heterorl.common.wire.policy_messages import manifest_digest, manifest_from_bytes, manifest_to_bytes
from heterorl.common.wire.rollout_messages import (
    evaluation_from_pb,
    evaluation_to_pb,
    leased_to_pb,
    outcome_from_pb,
    queued_from_pb,
)
from heterorl.common.wire.run_messages import (
    commands_from_pb,
    heartbeat_from_pb,
    heartbeat_to_pb,
    register_answer_from_pb,
    registration_from_pb,
    registration_to_pb,
    status_from_pb,
    status_to_pb,
)
from heterorl.common.wire.sealed_groups import open_group, read_sealed, seal
from heterorl.v1 import common_pb2, policy_pb2, rollout_pb2, run_pb2
from tests.support.groups import GROUPS, group_to_bytes

text = st.text(alphabet="abc-0", min_size=1, max_size=8)
uint = st.integers(0, 2**40)
version = st.integers(-1, 2**40)
single = st.floats(width=32, allow_nan=False)
real = st.floats(allow_nan=False, allow_infinity=False, width=64)
digest = st.text(alphabet="0123456789abcdef", min_size=64, max_size=64)
group_ids = st.builds(GroupId, site=text, incarnation=text, sequence=uint)


sampling = st.builds(
    SamplingSemantics,
    temperature=real,
    top_p=real,
    top_k=st.integers(0, 999),
    max_new_tokens=st.integers(0, 9999),
    logprob_mode=st.sampled_from(LogprobMode),
)
contracts = st.builds(
    Contract,
    tokenizer_digest=digest,
    chat_template_digest=digest,
    task_digest=digest,
    layout_id=digest,
    vocab_size=st.integers(0, 2**31),
    num_prompts=uint,
    group_size=st.integers(0, 999),
    sampling=sampling,
    end_token_ids=st.sets(st.integers(0, 2**31), max_size=3).map(sorted).map(tuple),
    min_members=st.integers(0, 999),
    max_turns=st.integers(1, 999),
    max_trajectory_tokens=st.integers(0, 2**31),
    trajectory_s=real.map(abs),
    lora=st.just(NO_LORA)
    | st.builds(
        LoraSettings,
        rank=st.integers(1, 1024),
        alpha=real,
        target_modules=st.lists(text, max_size=3).map(tuple),
        base_digest=digest,
    ),
)
payloads = st.builds(
    PayloadRef,
    kind=st.sampled_from(PayloadKind),
    from_version=version,
    to_version=version,
    digest=digest,
    num_bytes=uint,
)
manifests = st.builds(
    Manifest,
    run_id=text,
    epoch=uint,
    version=version,
    parent_version=version,
    parent_digest=digest,
    layout_id=digest,
    chunk_digests=st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple),
    state_root=digest,
    step=uint,
    num_changed=uint,
    num_elements=uint,
    num_byte_elements=uint,
    full_bytes=uint,
    payloads=st.lists(payloads, max_size=2).map(tuple),
)
completions = st.builds(
    CompletionNumbers,
    length_mean=real,
    length_p95=real,
    length_max=st.integers(0, 2**32 - 1),
    length_high_reward=st.none() | real,
    length_low_reward=st.none() | real,
    truncated_fraction=real,
    uniform_fraction=real,
    reward_parts=st.lists(st.builds(PartMean, name=text, mean=real), max_size=2).map(tuple),
    sites=st.lists(st.builds(SiteTokens, site=text, num_groups=st.integers(0, 999), num_tokens=uint), max_size=2).map(
        tuple
    ),
    turns_mean=real,
    turns_max=st.integers(0, 2**32 - 1),
    given_mean=real,
    endings=st.lists(st.builds(PartMean, name=text, mean=real), max_size=2).map(tuple),
)
times = st.builds(
    StepTimes, period_s=real, waiting_s=real, examining_s=real, computing_s=real, evaluating_s=real, publishing_s=real
)
progress = st.builds(
    LearnerProgress,
    step=uint,
    phase=st.sampled_from(LearnerPhase),
    phase_s=real,
    micro_batches_done=st.integers(0, 999),
    micro_batches=st.integers(0, 999),
)
reports = st.builds(
    StepReport,
    step=uint,
    version=version,
    loss=real,
    reward_mean=real,
    kl=real,
    ess_fraction=real,
    iw_variance=real,
    clip_fraction=real,
    entropy=real,
    grad_norm=real,
    staleness_mean=real,
    staleness_max=uint,
    policy_age_p50_s=real,
    num_groups=st.integers(0, 999),
    num_replaced=uint,
    lr=real,
    num_tokens=uint,
    step_s=real,
    is_applied=st.booleans(),
    evaluation_accuracy=st.none() | real,
    mask_share_bad=st.none() | real,
    kl_token_fresh=st.none() | real,
    completions=st.none() | completions,
    times=st.none() | times,
)


@given(GROUPS)
def test_group_survives_bytes_bit_for_bit(group):
    sealed = seal(group)
    back = open_group(read_sealed(sealed.data))

    assert seal(back) == read_sealed(sealed.data) == sealed
    assert (back.id, back.assignment, back.state_root) == (group.id, group.assignment, group.state_root)
    assert back.is_seeded == group.is_seeded
    for one, other in zip(back.rollouts, group.rollouts, strict=True):
        assert one.token_ids.dtype == np.int32
        assert one.token_ids.tolist() == other.token_ids.tolist()
        # bit patterns: NaN must stay NaN to be refused later
        assert one.sampler_logprobs.view(np.int32).tolist() == other.sampler_logprobs.view(np.int32).tolist()
        assert (one.spans, one.finish_reason) == (other.spans, other.finish_reason)
        assert repr((one.reward, one.reward_parts)) == repr((other.reward, other.reward_parts))


@given(GROUPS, real, real, st.none() | st.integers(0, 2**63), text, st.booleans())
def test_group_streamed_to_the_learner_keeps_what_the_coordinator_knows_of_it(
    group, policy_age, queue_age, seed, variant, wants_note
):
    ages = {"policy_age_s": policy_age, "queue_age_s": queue_age, "seed": seed, "variant": variant}
    ages["wants_note"] = wants_note
    data = leased_to_pb(LeasedGroup(sealed=seal(group), **ages)).SerializeToString()
    message = rollout_pb2.StreamGroupsResponse.FromString(data)
    back = queued_from_pb(message)

    assert data == rollout_pb2.StreamGroupsResponse(group=group_to_bytes(group), **ages).SerializeToString()
    assert seal(back.group) == seal(group)
    assert dataclasses.replace(back, group=group) == QueuedGroup(group=group, **ages)


@given(contracts)
def test_contract_survives_bytes(contract):
    assert contract_from_bytes(contract_to_bytes(contract)) == contract


@given(manifests)
def test_manifest_survives_bytes_and_digest_is_of_the_bytes(manifest):
    data = manifest_to_bytes(manifest)

    assert manifest_from_bytes(data) == manifest
    assert manifest_digest(data) != manifest_digest(data + b"\x08\x00")


small = st.integers(0, 2**32 - 1)
draws = st.builds(
    EvaluationDraws, num_prompts=small, num_samples=st.integers(1, 2**32 - 1), temperature=st.floats(0, 10),
    top_p=st.floats(0.01, 1), max_new_tokens=st.integers(1, 2**32 - 1), seed=st.integers(0, 2**63 - 1), pass_reward=real,
)  # fmt: skip
estimates = st.builds(Estimate, mean=real, low=real, high=real, num_prompts=small)
CASES = [
    (reports, partial(to_message, common_pb2.StepReport), partial(to_value, StepReport)),
    (
        st.builds(
            PublishRequest,
            epoch=uint,
            step_id=text,
            parent_version=version,
            lineage_version=version,
            manifest=st.binary(max_size=9),
            consumed=st.lists(group_ids, max_size=2).map(tuple),
            reports=st.lists(reports, max_size=2).map(tuple),
            signature=st.binary(max_size=9),
            encode_s=real,
            variants=st.lists(
                st.builds(
                    VariantVersion,
                    variant=text,
                    manifest=st.binary(max_size=9),
                    signature=st.binary(max_size=9),
                    canary=st.lists(st.floats(width=32, allow_nan=False), max_size=2).map(tuple),
                ),
                max_size=2,
            ).map(tuple),
        ),
        partial(to_message, policy_pb2.PublishVersionRequest),
        partial(to_value, PublishRequest),
    ),
    (
        st.builds(
            PullPlan,
            kind=st.sampled_from(PlanKind),
            target_version=version,
            payloads=st.lists(payloads, max_size=2).map(tuple),
            manifests=st.lists(st.binary(max_size=9), max_size=2).map(tuple),
            reason=text,
        ),
        partial(to_message, policy_pb2.PlanPullResponse),
        partial(to_value, PullPlan),
    ),
    (
        st.builds(
            WorkGrant,
            assignments=st.lists(
                st.builds(WorkAssignment, id=uint, prompt_index=uint, seed=st.integers(0, 2**63), lease_s=real),
                max_size=2,
            ).map(tuple),
            reason=text,
            retry_after_s=real,
            evaluation=st.none()
            | st.builds(EvaluationSpec, task_set=text, version=version, state_root=digest, draws=draws),
        ),
        partial(to_message, rollout_pb2.LeaseWorkResponse),
        partial(to_value, WorkGrant),
    ),
    (
        st.builds(
            Registration,
            site=text,
            incarnation=text,
            contract=contracts,
            engine=text,
            dtype=text,
            max_delay_versions=uint,
            variant=text,
            max_delay_s=real,
            lowest_sequence=uint,
            work_ahead_s=real,
            held=st.none() | st.lists(uint, max_size=3).map(tuple),
        ),
        registration_to_pb,
        registration_from_pb,
    ),
    (
        st.builds(
            RegisterAnswer,
            run_id=text,
            head_version=version,
            next_sequence=uint,
            max_staleness_versions=uint,
            max_message_bytes=uint,
            work_ahead_s=real,
        ),
        partial(to_message, run_pb2.RegisterResponse),
        register_answer_from_pb,
    ),
    (
        st.builds(
            Heartbeat,
            site=text,
            incarnation=text,
            policy_version=version,
            state_root=digest,
            tokens_per_s=real,
            apply_s=real,
            problem=text,
        ),
        heartbeat_to_pb,
        heartbeat_from_pb,
    ),
    (
        st.builds(CanaryReport, site=text, incarnation=text, version=version, logprobs=st.lists(single).map(tuple)),
        partial(to_message, run_pb2.ReportCanaryRequest),
        partial(to_value, CanaryReport),
    ),
    (
        st.builds(CanaryVerdict, difference=st.none() | real, quarantine=text),
        partial(to_message, run_pb2.ReportCanaryResponse),
        partial(to_value, CanaryVerdict),
    ),
    (
        st.lists(st.sampled_from(Command)).map(tuple),
        lambda commands: new_message(run_pb2.HeartbeatResponse, commands=commands),
        commands_from_pb,
    ),
    (
        st.builds(
            PushOutcome,
            id=group_ids,
            status=st.sampled_from(PushStatus),
            reason=st.none() | st.sampled_from(DropReason),
            message=text,
            retry_after_s=real,
        ),
        partial(to_message, rollout_pb2.GroupOutcome),
        outcome_from_pb,
    ),
    (
        st.builds(
            RunStatus,
            run_id=text,
            head_version=version,
            epoch=uint,
            learner=text,
            is_draining=st.booleans(),
            uptime_s=real,
            ledger=st.builds(
                LedgerCounts,
                acked=uint,
                pending=uint,
                leased=uint,
                consumed=uint,
                dropped=st.dictionaries(st.sampled_from(DropReason), st.integers(1, 99)),
            ),
            bytes_full=uint,
            bytes_last=uint,
            changed_fraction=real,
            sites=st.lists(
                st.builds(
                    SiteStatus,
                    site=text,
                    incarnation=text,
                    policy_version=version,
                    state_root=digest,
                    last_seen_s=real,
                    groups_accepted=uint,
                    groups_dropped=uint,
                    tokens_per_s=real,
                    work_leased=uint,
                    apply_s=real,
                    variant=text,
                    groups_failed=uint,
                    groups_refused=uint,
                    quota_used=real,
                    work_away=uint,
                    work_ahead_s=real,
                ),
                max_size=2,
            ).map(tuple),
            last_report=st.none() | reports,
            prompts=st.none()
            | st.builds(
                PromptCounts, in_window=uint, too_easy=uint, too_hard=uint, unseen=uint, passed_over=uint
            ),
            progress=st.none() | progress,
            progress_age_s=real,
            delta_bytes=uint,
            snapshot_bytes=uint,
            rollback_to=version,
            is_rollback_refused=st.booleans(),
            facts=st.dictionaries(text, text, max_size=2),
            encode_s=real,
            variants=st.lists(
                st.builds(
                    VariantStatus,
                    variant=text,
                    version=version,
                    full_bytes=uint,
                    delta_bytes=uint,
                    snapshot_bytes=uint,
                    changed_fraction=real,
                ),
                max_size=2,
            ).map(tuple),
        ),
        status_to_pb,
        status_from_pb,
    ),
    (
        st.builds(
            Evaluation, version=version, task_set=text, state=st.sampled_from(EvaluationState), num_wanted=small,
            draws=draws, task_digest=text,
            summary=st.builds(
                EvaluationSummary, num_prompts=small, num_samples=small, num_errors=small, num_truncated=small,
                mean_tokens=real, average=st.none() | estimates,
                passes=st.lists(st.builds(PassEstimate, k=small, estimate=estimates), max_size=2).map(tuple),
            ),
            sites=st.lists(st.tuples(text, small), max_size=2).map(tuple), planned_time=real, ended_time=real,
        ),
        evaluation_to_pb,
        evaluation_from_pb,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "to_pb", "from_pb"), CASES, ids=map(str, range(len(CASES))))
@given(data=st.data())
def test_message_survives_the_wire(strategy, to_pb, from_pb, data):
    value = data.draw(strategy)
    message = to_pb(value)

    assert from_pb(type(message).FromString(message.SerializeToString())) == value


def test_values_that_nothing_can_hold_are_refused_with_their_field():
    with pytest.raises(InvalidRequest, match="logprob_mode"):
        contract_from_pb(common_pb2.Contract())
    for seconds in (-1.0, math.inf, math.nan):
        message = common_pb2.Contract(sampling={"logprob_mode": 1}, trajectory_s=seconds)
        with pytest.raises(InvalidRequest, match=f"contract.trajectory_s: {seconds} is not a number of seconds"):
            contract_from_pb(message)
    with pytest.raises(MalformedPayload):
        read_sealed(b"\xff\xff")
    with pytest.raises(MalformedPayload):
        manifest_from_bytes(b"\xff\xff")
    with pytest.raises(InvalidRequest, match="kind"):
        to_value(PullPlan, policy_pb2.PlanPullResponse())


@pytest.mark.parametrize("bad", ["", "ab", "../" * 22, "A" * 64, "g" * 64])
def test_digest_field_refuses_what_is_not_a_digest(bad):
    with pytest.raises(InvalidRequest, match="payload"):
        digest_field("payload", bad)


@pytest.mark.parametrize(
    "value", [StepReport, CompletionNumbers, PartMean, SiteTokens, StepTimes, LearnerProgress], ids=lambda v: v.__name__
)
def test_reports_have_the_same_fields_on_both_sides(value):
    fields = {field.name for field in dataclasses.fields(value)}

    assert fields == {field.name for field in getattr(common_pb2, value.__name__).DESCRIPTOR.fields}


@given(reports)
def test_report_survives_the_rows_of_stores_and_journals(report):
    assert value_of_row(StepReport, json.loads(json.dumps(dataclasses.asdict(report)))) == report


def test_what_an_earlier_learner_does_not_state_is_absent_and_not_0():
    message = common_pb2.StepReport(step=3, reward_mean=0.5)
    report = to_value(StepReport, common_pb2.StepReport.FromString(message.SerializeToString()))
    row = dataclasses.asdict(report)
    del row["completions"], row["times"]

    assert (report.completions, report.times) == (None, None)
    assert value_of_row(StepReport, row) == report


def test_phase_of_a_newer_learner_is_no_progress():
    assert progress_from_pb(common_pb2.LearnerProgress(step=3, phase=common_pb2.LEARNER_PHASE_UNSPECIFIED)) is None
