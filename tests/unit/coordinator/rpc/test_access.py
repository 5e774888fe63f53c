"""The table of rpc against role, by each role; and the rule for plaintext."""

import dataclasses

import pytest
from google.protobuf import descriptor as descriptors

from heterorl.common import api
from heterorl.common.errors import ConfigError, Unauthenticated
from heterorl.common.identity.spiffe import Identity, LocalPeer, RefusalReason, Role, spiffe_uri
from heterorl.common.identity.tls import ServerTlsConfig, TlsConfig, check_tls
from heterorl.coordinator.rpc.access import RULES, CallAuthorizer, refuse_call, refuse_request
from heterorl.v1 import common_pb2, rollout_pb2, run_pb2
from tests.support.protos import METHODS

ALLOWED = {
    Role.COORDINATOR: {"Check", "Diagnose"},
    Role.OPERATOR: {
        "Check", "Diagnose", "GetStatus", "ListSteps", "Drain", "Rollback", "ListRestorable", "ReleaseSite", "Backup",
        "ListSamples", "GetSample", "ListEvaluations",
    },
    Role.LEARNER: {
        "Check", "AcquireLease", "RenewLease", "ReleaseLease", "QueryUpload", "UploadPayload",
        "PublishVersion", "GetStep", "WatchHead", "GetManifest", "ListManifests", "PlanPull", "ReadPayload",
        "StreamGroups", "AbandonGroups", "RejectGroups", "Drain", "Diagnose", "DescribeRun",
        "NoteSamples", "PushLearnerMetrics",
    },
    Role.SAMPLER: {
        "Check", "WatchHead", "GetManifest", "ListManifests", "PlanPull", "ReadPayload", "LeaseWork",
        "AbandonWork", "PushGroups", "Register", "Heartbeat", "ReportCanary", "Diagnose",
        "PushEvaluation", "PushSamplerMetrics",
    },
    # For itself; what it carries is judged by the node whose it is.
    Role.RELAY: {
        "Check", "WatchHead", "GetManifest", "ListManifests", "PlanPull", "ReadPayload", "Diagnose",
        "PushRelayMetrics",
    },
}  # fmt: skip


def identity(role, **changes):
    values = {"run": "run", "site": "a", "role": role, "serial": 1, "not_before": 0.0, "not_after": 10.0}
    return Identity(**{**values, **changes})


def test_table_has_every_rpc_of_the_protos_and_no_other():
    # Of Health the package has calls that we do not serve.
    served = {name for name in METHODS if not name.endswith(("/List", "/Watch"))}

    assert set(RULES) == served


@pytest.mark.parametrize("role", Role)
def test_every_rpc_is_open_to_a_role_or_refused_by_it(role):
    refusals = {method: refuse_call(method, identity(role), run="run") for method in RULES}
    expected = {method: method.rpartition("/")[2] in ALLOWED[role] for method in RULES}

    assert {method: refusal is None for method, refusal in refusals.items()} == expected
    assert {refusal.reason for refusal in refusals.values() if refusal} == {RefusalReason.ROLE}


@pytest.mark.parametrize(
    ("protocol", "role"),
    [(api.LearnerApi, Role.LEARNER), (api.SamplerApi, Role.SAMPLER), (api.OperatorApi, Role.OPERATOR)],
)
def test_protocol_of_a_role_has_what_the_table_opens_to_it_and_no_more(protocol, role):
    # Not of these Protocols: health, the doctor's questions and backups have clients of their own, and metrics are no
    # part of what a role does.
    others = {"Check", "Diagnose", "Backup", "PushSamplerMetrics", "PushLearnerMetrics"}
    open_to_it = ALLOWED[role] - others
    methods = {name for name in dir(protocol) if not name.startswith("_")}

    assert {name.replace("signed_", "").title().replace("_", "") for name in methods} == open_to_it
    assert all(getattr(protocol, name).__doc__ for name in methods)


def test_nobody_keeps_the_coordinator_busy_by_metrics():
    pushes = {method: rule for method, rule in RULES.items() if "/heterorl.v1.MetricsService/" in method}

    assert {rule.at_once for rule in pushes.values()} == {2}
    assert all(rule.site == ("site",) and len(rule.roles) == 1 for rule in pushes.values())


def test_unknown_rpc_is_open_to_nobody_and_run_comes_before_role():
    assert refuse_call("/x.Y/Z", LocalPeer(), run="run").reason is RefusalReason.UNKNOWN_RPC
    other = refuse_call("/heterorl.v1.RunService/GetStatus", identity(Role.OPERATOR, run="other"), run="run")
    assert other.reason is RefusalReason.RUN
    assert refuse_call("/heterorl.v1.RunService/GetStatus", LocalPeer(), run="run") is None


def _site_paths(message: descriptors.Descriptor, prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    paths = {(*prefix, field.name) for field in message.fields if field.name == "site"}
    for field in message.fields:
        if field.message_type is not None:
            paths |= _site_paths(field.message_type, (*prefix, field.name))
    return paths


@pytest.mark.parametrize("method", sorted(name for name, rule in RULES.items() if Role.SAMPLER in rule.roles))
def test_every_site_that_a_sampler_can_state_is_compared(method):
    request, rule = METHODS[method].input_type, RULES[method]
    # A push is a list of groups where it is checked.
    request = rollout_pb2.Group.DESCRIPTOR if method.endswith("/PushGroups") else request

    assert _site_paths(request) == ({rule.site} if rule.site else set())


def test_site_in_a_request_must_be_the_certificates():
    method = "/heterorl.v1.RolloutService/PushGroups"
    request = [rollout_pb2.Group(id=common_pb2.GroupId(site="a"))]

    assert refuse_request(method, identity(Role.SAMPLER), request) is None
    assert refuse_request(method, identity(Role.SAMPLER, site="b"), request).reason is RefusalReason.SITE
    assert refuse_request(method, identity(Role.SAMPLER), [rollout_pb2.Group()]) is not None
    assert refuse_request(method, LocalPeer(), request) is None


def test_site_of_every_group_in_a_request_must_be_the_certificates():
    method = "/heterorl.v1.RolloutService/PushGroups"
    request = [rollout_pb2.Group(id=common_pb2.GroupId(site="a")) for _ in range(2)]
    assert refuse_request(method, identity(Role.SAMPLER), request) is None

    request.append(rollout_pb2.Group(id=common_pb2.GroupId(site="b")))
    assert refuse_request(method, identity(Role.SAMPLER), request).reason is RefusalReason.SITE


def test_learner_drains_under_its_epoch_alone():
    drain = "/heterorl.v1.RunService/Drain"

    def refused(role, **fields):
        peer = Identity(run="run", site="x", role=role, serial=1, not_before=0.0, not_after=1.0)
        return refuse_request(drain, peer, run_pb2.DrainRequest(**fields))

    assert refused(Role.LEARNER).reason is RefusalReason.ROLE
    assert refused(Role.LEARNER, epoch=0) is None
    assert refused(Role.OPERATOR) is None
    assert refuse_request(drain, LocalPeer(), run_pb2.DrainRequest()) is None


def test_lifetime_has_both_ends():
    one = identity(Role.SAMPLER)

    assert one.refuse_at(0.0) is one.refuse_at(10.0) is None
    assert one.refuse_at(-0.1).reason is one.refuse_at(10.1).reason is RefusalReason.EXPIRED
    assert one.uri == spiffe_uri(run="run", site="a", role=Role.SAMPLER) == "spiffe://run/site/a/role/sampler"
    assert dataclasses.replace(one, site="b") != one


@pytest.mark.parametrize(("serial", "now", "why"), [(2, 5.0, "2 is revoked"), (3, 11.0, "has expired")])
def test_refusal_of_a_relay_is_not_its_samplers_end(serial, now, why):
    relay = identity(Role.RELAY, serial=2, site="eu")
    node = identity(Role.SAMPLER, site="eu.1", through=relay, not_after=20.0)
    authorizer = CallAuthorizer(run_id="run", is_plaintext=False, revoked={serial}, wall_time=lambda: now)

    with pytest.raises(Unauthenticated, match=f"the relay of eu: .*{why}") as caught:
        authorizer.recheck(node)
    assert caught.value.is_transient
    # Its own revocation is final, also where its relay is refused too.
    authorizer.revoked = {1, serial}
    with pytest.raises(Unauthenticated, match="certificate 1 is revoked") as caught:
        authorizer.recheck(node)
    assert not caught.value.is_transient


FILES = {"ca": "a", "cert": "b", "key": "c"}


@pytest.mark.parametrize(
    ("tls", "address", "key"),
    [
        (TlsConfig(), "127.0.0.1:1", "tls.ca"),
        (TlsConfig(ca="a"), "127.0.0.1:1", "tls.cert"),
        (TlsConfig(ca="a", cert="b"), "127.0.0.1:1", "tls.key"),
        (TlsConfig(insecure=True), "10.0.0.1:1", "tls.insecure"),
        (TlsConfig(insecure=True), "0.0.0.0:1", "tls.insecure"),
        (TlsConfig(insecure=True, **FILES), "127.0.0.1:1", "tls.insecure"),
        (ServerTlsConfig(insecure=True, revoked="r"), "127.0.0.1:1", "tls.insecure"),
        (ServerTlsConfig(**FILES), "10.0.0.1:1", None),
        (TlsConfig(**FILES), "10.0.0.1:1", None),
        (TlsConfig(insecure=True), "127.0.0.1:1", None),
    ],
)
def test_plaintext_needs_the_operators_word_and_loopback(tls, address, key):
    if key is None:
        check_tls(tls, key="listen", address=address)
        return
    with pytest.raises(ConfigError) as wrong:
        check_tls(tls, key="listen", address=address)
    assert wrong.value.key == key
