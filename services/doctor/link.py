"""What is to be said about the way to the coordinator: pure decisions over measured facts."""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Sequence

from heterorl.common.identity.identity import Identity, Role
from heterorl.doctor.check import TIMEOUT, Check, Trouble, fail, ok, skip, warn
from heterorl.doctor.network import Connected, Handshake, Reached, Trial

EXPIRY_WARN_S = 14 * 86400.0
CLOCK_WARN_S = 5.0
"""Ages and leases are the coordinator's alone; only people who compare logs are misled by less than CLOCK_FAIL_S."""
CLOCK_FAIL_S = 300.0
"""How far ahead an authority's clock may be: a fresh certificate begins this long before it was made."""
MTU_WARN_BYTES = 1280
RTT_WARN_S = 1.0
_RENEW = "get a new one: `heterorl join` with a new token, or `heterorl certs renew` where the authority is"


def judge_dns(host: str, fact: tuple[str, ...] | Trouble) -> Check:
    """Whether the name has an address."""
    if isinstance(fact, Trouble):
        if fact.kind == TIMEOUT:
            return fail("dns", f"{host}: {fact.detail}", "correct the resolver of this machine (/etc/resolv.conf)")
        return fail(
            "dns", f"{host}: {fact.detail}", "correct the host in `coordinator`, or add it to DNS or /etc/hosts"
        )
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return ok("dns", f"{host} is {', '.join(fact)}")
    return ok("dns", f"{host} is an address")


def judge_port(address: str, fact: Connected | Trouble, *, is_own: bool = False) -> Check:
    """Whether something listens; `is_own`: it would be this node itself."""
    if not isinstance(fact, Trouble):
        return ok("port", f"{address} accepts after {_ms(fact.seconds)}")
    if fact.kind == TIMEOUT:
        remedy = "let the coordinator's port through firewalls and security groups between here and there"
        return fail("port", f"{address}: {fact.detail}", remedy)
    if fact.kind == "refused":
        if is_own:
            return warn(
                "port", f"{address} refuses", "start the coordinator, then ask again for the checks of its link"
            )
        return fail("port", f"{address} refuses", "start the coordinator, or correct the port: its `listen` says which")
    return fail("port", f"{address}: {fact.detail}", "correct routes or the address: the machine cannot be reached")


def judge_handshake(host: str, fact: Handshake | Trouble) -> Check:
    """Whether both ends believe each other."""
    if isinstance(fact, Handshake):
        if fact.server is None or fact.server.role not in (Role.COORDINATOR, Role.RELAY):
            named = "nobody of a run" if fact.server is None else fact.server.uri
            remedy = "correct `coordinator`: what answers there is no coordinator and no relay"
            return fail("tls", f"{fact.protocol}, the server is {named}", remedy)
        return ok("tls", f"{fact.protocol} with {fact.server.uri}")
    remedies = {
        TIMEOUT: "find what is between: the port is open, but nothing answers a handshake",
        "files": "correct [tls]: the files of this node are not usable",
        "authority": "copy ca.crt of the coordinator's authority to `tls.ca`: another one signed its certificate",
        "hostname": f"dial a name in the coordinator's certificate, or issue it anew with `--host {host}`",
        "server_expired": "renew the coordinator's certificate with `heterorl certs renew`",
        "server_not_yet": "set this machine's clock: the coordinator's certificate is not valid yet by it",
        "refused_us": "get a certificate of the coordinator's authority: it refused this node's (expired, or foreign)",
        "not_tls": "correct the port: what listens there does not speak TLS",
        "closed": "correct the port: what listens there does not speak TLS",
    }
    return fail("tls", f"{fact.kind.replace('_', ' ')}: {fact.detail}", remedies[fact.kind])


def judge_certificate(fact: Identity | Trouble, *, role: Role, site: str, server: Identity | None) -> Check:
    """Whether this node's certificate is of its role, its site and the coordinator's run; `site` empty: any."""
    if isinstance(fact, Trouble):
        return fail("certificate", fact.detail, "correct [tls], or get the files anew with `heterorl join`")
    found = f"this node is {fact.uri}"
    if fact.role is not role:
        return fail("certificate", found, f"put a certificate for role {role} into [tls]")
    if site and fact.site != site:
        return fail("certificate", f"{found}, `site` is {site}", f"set `site` to {fact.site}, or get one for {site}")
    if server is not None and server.run != fact.run:
        return fail("certificate", f"{found}, the coordinator's run is {server.run}", f"join run {server.run}")
    return ok("certificate", found)


def judge_expiry(fact: Identity | Trouble, *, now: float) -> Check:
    """Whether the certificate is valid, and for how long; `now` in seconds since the epoch."""
    if isinstance(fact, Trouble):
        return skip("expiry", "no certificate was read")
    left_s = fact.not_after - now
    if left_s <= 0:
        return fail("expiry", f"expired {_days(-left_s)} ago", _RENEW)
    if now < fact.not_before:
        return fail("expiry", f"begins in {_days(fact.not_before - now)}", "set this machine's clock")
    if left_s < EXPIRY_WARN_S:
        return warn("expiry", f"expires in {_days(left_s)}", _RENEW)
    return ok("expiry", f"expires in {_days(left_s)}")


def judge_revoked(fact: int | Trouble | None) -> Check:
    """Whether a coordinator reads a list of revoked certificates: how many are on it; None where none is named."""
    if fact is None:
        remedy = "set `tls.revoked` to a copy of the authority's list (an empty file is none): `heterorl certs revoke`"
        return warn("revoked", "tls.revoked is not set: a revoked certificate goes on working", f"{remedy} writes it")
    if isinstance(fact, Trouble):
        return fail("revoked", fact.detail, "copy the authority's `certs/revoked` there; an empty file is none")
    return ok("revoked", f"{fact} certificates are refused")


def judge_answer(fact: Reached | Trouble) -> Check:
    """Whether the coordinator answers this node, and how fast."""
    if isinstance(fact, Reached):
        middle = statistics.median(fact.round_trips)
        found = f"run {fact.diagnosis.run_id}, version {fact.diagnosis.head_version}; round trip {_ms(middle)} "
        found += f"(median of {len(fact.round_trips)}, worst {_ms(max(fact.round_trips))})"
        if middle > RTT_WARN_S:
            return warn("coordinator", found, "look for a nearer way: the line is slow or overloaded")
        return ok("coordinator", found)
    remedies = {
        TIMEOUT: "look at the coordinator's log: it accepts connections but does not answer",
        "Unauthenticated": "get a new certificate: the coordinator does not accept this one (revoked or expired)",
        "PermissionDenied": "get a certificate of the coordinator's run: this one is of another",
        "ConfigError": "correct [tls] first: no call was made",
        "old": "install the same release of heterorl at both ends: the coordinator does not know this question",
    }
    generic = "look at the coordinator's log, and at proxies on the way: the port is open, the call failed"
    return fail("coordinator", f"{fact.detail}", remedies.get(fact.kind, generic))


def judge_clock(fact: Reached) -> Check:
    """Whether this machine's clock agrees with the coordinator's, as far as the round trip lets one see."""
    off_s = max(0.0, abs(fact.ahead_s) - fact.uncertainty_s)
    off = f"{abs(fact.ahead_s):.3g} s" if abs(fact.ahead_s) >= 1 else _ms(abs(fact.ahead_s))
    found = f"{off} {'behind' if fact.ahead_s > 0 else 'ahead of'} the coordinator's"
    found += f" (+- {_ms(fact.uncertainty_s)})"
    remedy = "synchronise this machine's clock (`timedatectl set-ntp true`), and the coordinator's"
    if off_s > CLOCK_FAIL_S:
        return fail("clock", found, remedy)
    return warn("clock", found, remedy) if off_s > CLOCK_WARN_S else ok("clock", found)


def judge_messages(trials: Sequence[Trial], *, own_limit: int, server_limit: int) -> Check:
    """Whether messages of the largest size get through both ways."""
    largest = {way: max((t.num_bytes for t in trials if t.direction == way and not t.error), default=0)
               for way in ("up", "down")}  # fmt: skip
    rates = {
        way: max(
            (t.num_bytes / max(t.seconds, 1e-9) for t in trials if t.direction == way and not t.error), default=0.0
        )
        for way in ("up", "down")
    }
    found = "; ".join(f"{way} {_size(largest[way])} at {rates[way] / 1e6:.3g} MB/s" for way in ("up", "down"))
    lost = [trial for trial in trials if trial.error]
    if lost:
        found += f"; {_size(lost[0].num_bytes)} {lost[0].direction}: {lost[0].error}"
        if not lost[0].is_timeout:
            return fail("messages", found, "look for a proxy on the way that limits the size of messages")
        if min(largest.values()) == 0:
            return fail("messages", found, "lower the interface's MTU to 1280: large packets are lost on the way")
        return warn("messages", found, "the line is slow: look for a better one, or send shorter groups")
    if own_limit != server_limit:
        remedy = (
            f"set max_message_bytes to the coordinator's {server_limit} (this node's is {own_limit}), or the reverse"
        )
        return warn("messages", found, remedy)
    return ok("messages", found)


def judge_mtu(fact: int | Trouble) -> Check:
    """A hint: the largest packet that the kernel sends on this way."""
    if isinstance(fact, Trouble):
        return skip("mtu", f"not known: {fact.detail}")
    if fact < MTU_WARN_BYTES:
        return warn("mtu", f"{fact} bytes", "look at tunnels on the way: packets of less than 1280 bytes cost speed")
    return ok("mtu", f"{fact} bytes")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.0f} days" if seconds >= 2 * 86400 else f"{seconds / 3600:.1f} hours"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3g} MiB"
