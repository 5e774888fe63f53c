"""Places for calls: by certificate and by site, with something kept for the learner and the operator."""

import contextlib

from heterorl.common.errors import QuotaExceeded
from heterorl.common.identity.spiffe import Identity, LocalPeer, Role
from heterorl.common.rpc.server_limits import SHORT, SHORT_BYTES, Caller
from heterorl.coordinator.rpc.access import RULES
from heterorl.coordinator.rpc.bounds import Text, bound_of
from heterorl.coordinator.rpc.call_admission import Shares, holder_of
from tests.support.protos import METHODS, is_repeated

HEARTBEAT = "/heterorl.v1.RunService/Heartbeat"
DIAGNOSE = "/heterorl.v1.DiagnosisService/Diagnose"
RENEW = "/heterorl.v1.PolicyService/RenewLease"
EVIL, HONEST = (Caller(f"sampler {name}", False, is_proven=True) for name in ("evil", "honest"))
LEARNER, OPERATOR = (Caller(f"{name} main", True, is_proven=True) for name in ("learner", "operator"))
_HELD = []
"""Places that are not given back."""


def _take(shares, holder, count, method=HEARTBEAT):
    """Up to `count` places; returns how many there were."""
    for number in range(count):
        try:
            place = shares.place(holder, method)
            place.__enter__()
            _HELD.append(place)
        except QuotaExceeded as error:
            return number if error.retry_after_s > 0 else -1
    return count


def _peer(role, site):
    return Identity(run="run", site=site, role=role, serial=1, not_before=0.0, not_after=1.0)


def test_one_certificate_is_one_holder_whatever_it_dials_from():
    first, second = (holder_of(_peer(Role.SAMPLER, "eu-1"), HEARTBEAT, address) for address in ("a:1", "b:2"))

    assert first == second
    assert first != holder_of(_peer(Role.SAMPLER, "eu-2"), HEARTBEAT, "a:1")
    assert first != holder_of(_peer(Role.LEARNER, "eu-1"), RENEW, "a:1")
    assert [holder_of(_peer(role, "x"), DIAGNOSE, "").is_privileged for role in Role] == [
        role not in (Role.SAMPLER, Role.RELAY) for role in Role
    ]


def test_without_certificates_connections_and_what_is_called_tell_callers_apart():
    learner = holder_of(LocalPeer(), RENEW, "ipv4:127.0.0.1:1")
    node = holder_of(LocalPeer(), HEARTBEAT, "ipv4:127.0.0.1:1")

    assert learner.is_privileged
    assert not node.is_privileged
    assert node != holder_of(LocalPeer(), HEARTBEAT, "ipv4:127.0.0.1:2")


def test_one_site_takes_its_share_and_others_find_places():
    shares = Shares(places=1024, per_site=32)

    assert _take(shares, EVIL, 1000) == 32
    assert _take(shares, HONEST, 5) == 5


def test_all_sites_together_leave_places_to_the_learner_and_the_operator():
    shares = Shares(places=1024, per_site=32)
    sites = [Caller(f"sampler {number}", False, is_proven=True) for number in range(100)]

    assert sum(_take(shares, site, 32) for site in sites) == 896
    assert _take(shares, HONEST, 1) == 0
    assert _take(shares, LEARNER, 1000, RENEW) == 64
    assert _take(shares, OPERATOR, 1000, DIAGNOSE) == 1
    assert _take(shares, OPERATOR, 1000, RENEW) == 63


def test_smallest_server_keeps_a_place_for_both():
    shares = Shares(places=8, per_site=32)

    assert _take(shares, EVIL, 10) == 3
    assert _take(shares, HONEST, 10) == 3
    assert _take(shares, Caller("sampler third", False, is_proven=True), 1) == 0
    assert _take(shares, LEARNER, 1, RENEW) == 1
    assert _take(shares, OPERATOR, 1, RENEW) == 1


def test_certificates_of_one_site_leave_places_to_other_sites():
    shares = Shares(places=1024, per_site=32)
    gpus = [holder_of(_peer(Role.SAMPLER, f"eu.gpu{number}"), HEARTBEAT, "") for number in range(100)]

    assert sum(_take(shares, gpu, 32) for gpu in gpus) == 672
    assert _take(shares, holder_of(_peer(Role.SAMPLER, "us.gpu1"), HEARTBEAT, ""), 5) == 5


def test_place_is_given_back_however_a_call_ends():
    shares = Shares(places=8, per_site=1)
    for _ in range(5):
        with contextlib.suppress(ZeroDivisionError), shares.place(EVIL, DIAGNOSE):
            assert _take(shares, EVIL, 1, DIAGNOSE) == 0
            raise ZeroDivisionError

    assert _take(shares, EVIL, 1, DIAGNOSE) == 1


def _most_bytes(message):
    """Of a request within its bounds; names, digests and lines are taken to be ASCII."""
    total = 0
    for field in message.fields:
        bound = bound_of(message.name, field.name)
        if field.message_type is not None:
            one = _most_bytes(field.message_type)
        elif field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            one = bound.length * (4 if bound.text is Text.PROSE else 1)
        else:
            one = 10
        total += (bound.count if is_repeated(field) else 1) * (one + 5)
    return total


def test_short_requests_are_those_that_fit_the_room_of_short_ones():
    nodes = {name for name, rule in RULES.items() if rule.roles & {Role.SAMPLER, Role.RELAY}}
    sizes = {name: _most_bytes(METHODS[name].input_type) for name in nodes if name in METHODS}

    assert nodes >= SHORT
    assert {name for name, size in sizes.items() if size <= SHORT_BYTES} == SHORT & sizes.keys()
