"""Fields are copied by name, and a field that one side lacks is told, never lost."""

import dataclasses

import pytest

from heterorl.common.errors import InvalidRequest
from heterorl.common.rpc.maintenance import Backup, Diagnosis
from heterorl.common.types.common import Series
from heterorl.common.types.policy import LeaseGrant, PullPlan
from heterorl.common.types.rollout import PushOutcome, PushStatus, Rejection, WorkGrant
from heterorl.common.types.run import CanaryVerdict
from heterorl.common.wire.common_messages import arguments, to_message, to_value
from heterorl.common.wire.policy_messages import grant_from_pb, grant_to_pb, renewal_to_pb
from heterorl.v1 import backup_pb2, diagnosis_pb2, evaluation_pb2, metrics_pb2, policy_pb2, rollout_pb2, run_pb2

GRANT = LeaseGrant(epoch=3, holder="a", ttl_s=9.0, head_version=7, max_staleness_versions=4, masks_stale=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wider(Series):
    """Series with a field that no message has."""

    unit: str = "s"


def test_a_field_that_the_message_lacks_is_an_error():
    wider = Wider(name="a", labels=("b",), values=(1.0,))

    with pytest.raises(ValueError, match="unit"):
        to_message(metrics_pb2.MetricSeries, wider)
    with pytest.raises(KeyError, match="unit"):
        to_value(Wider, metrics_pb2.MetricSeries())
    assert to_value(Series, to_message(metrics_pb2.MetricSeries, wider, without={"unit"})) == Series(
        name="a", labels=("b",), values=(1.0,)
    )


def test_messages_in_a_message_are_read_by_the_function_that_checks_them():
    plan = policy_pb2.PlanPullResponse(kind="PLAN_KIND_CHAIN", payloads=[policy_pb2.PayloadRef(digest="../x")])
    grant = rollout_pb2.LeaseWorkResponse(evaluation=evaluation_pb2.EvaluationSpec())

    with pytest.raises(InvalidRequest, match="payload.digest"):
        to_value(PullPlan, plan)
    with pytest.raises(InvalidRequest, match="draws"):
        to_value(WorkGrant, grant)
    assert to_value(PushOutcome, rollout_pb2.GroupOutcome(reason=99), status=PushStatus.RETRY).reason is None


def test_a_number_of_a_newer_enumeration_is_refused_where_one_is_needed():
    payload = policy_pb2.PayloadRef(digest="0" * 64)

    with pytest.raises(InvalidRequest, match=r"PayloadRef\.kind: 0 is no PayloadKind"):
        to_value(PullPlan, policy_pb2.PlanPullResponse(kind="PLAN_KIND_CHAIN", payloads=[payload]))
    with pytest.raises(InvalidRequest, match="PlanPullResponse.kind: 99 is no PlanKind"):
        to_value(PullPlan, policy_pb2.PlanPullResponse(kind=99))
    with pytest.raises(InvalidRequest, match=r"Rejection\.reason: 0 is no DropReason"):
        to_value(Rejection, rollout_pb2.Rejection())


def test_an_optional_field_is_none_only_where_it_is_unset():
    assert to_value(CanaryVerdict, run_pb2.ReportCanaryResponse()).difference is None
    assert to_value(CanaryVerdict, run_pb2.ReportCanaryResponse(difference=0.0)).difference == 0.0


def test_a_lease_says_bounds_always_and_orders_later():
    first = dataclasses.replace(GRANT, max_message_bytes=5, most_groups_per_version=6)
    ordered = dataclasses.replace(first, rollback_to=2, rollback_id="one")

    assert grant_from_pb(grant_to_pb(first)) == first
    assert grant_from_pb(renewal_to_pb(ordered)) == ordered
    assert grant_from_pb(renewal_to_pb(GRANT)) == GRANT


def test_backups_and_diagnoses_travel_whole():
    backup = Backup(path="/b", head_version=1, num_payloads=2, num_bytes=3, audit_digest="5")
    diagnosis = Diagnosis(
        server_time=1.0, run_id="run", heterorl_version="0.9", python_version="3.12", grpc_version="1.85",
        max_message_bytes=2, head_version=-1, bytes_full=3, contract=None, statement=b"s",
    )  # fmt: skip

    assert to_value(Backup, to_message(backup_pb2.BackupResponse, backup)) == backup
    message = to_message(diagnosis_pb2.DiagnoseResponse, diagnosis, padding=b"pad")
    assert to_value(Diagnosis, message) == diagnosis
    assert message.padding == b"pad"


def test_fields_of_a_request_are_arguments():
    read = policy_pb2.ReadPayloadRequest(digest="d", offset=0)
    lease = policy_pb2.AcquireLeaseRequest(holder="a", variants=["int8"])

    assert arguments(read) == {"digest": "d", "offset": 0, "stop": None}
    assert arguments(policy_pb2.ReadPayloadRequest(stop=0), digest="e") == {"digest": "e", "offset": 0, "stop": 0}
    assert arguments(lease, contract=None) == {
        "holder": "a", "request_id": "", "variants": ("int8",), "incarnation": "", "groups_per_version": 0,
        "statement": b"", "contract": None,
    }  # fmt: skip
