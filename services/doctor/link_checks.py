"""Checks of a coordinator's link: name, port, handshake, round trips, messages.

Measurements end within their time limit and send only handshakes and padding. Judgements (`judge_*`) are pure.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from heterorl.common.errors import HeterorlError, Unreachable
from heterorl.common.identity.spiffe import Identity, Role, read_identity
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.threads import num_threads
from heterorl.common.rpc.maintenance import MAX_ANSWER_BYTES, OVERHEAD_BYTES, Diagnosis, DiagnosisClient
from heterorl.common.types.common import amount
from heterorl.common.types.policy import version_words
from heterorl.doctor.check import TIMEOUT, Check, Failure, fail, ok, skip, warn

ResultT = TypeVar("ResultT")
_VERIFY = {10: "server_expired", 9: "server_not_yet", 62: "hostname", 64: "hostname"}
"""OpenSSL's X509_V_ERR_* for a server's certificate; any other code means an unknown authority."""
SMALL_BYTES = (64 << 10, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The address that accepted, and the seconds it took."""

    address: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """A finished handshake; `server` is None without a certificate of a run."""

    protocol: str
    server: Identity | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The coordinator's answers: round trips in seconds, facts, its clock's lead."""

    round_trips: tuple[float, ...]
    diagnosis: Diagnosis
    ahead_s: float
    uncertainty_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTrial:
    """One message, `up` or `down`; `error` is empty if it arrived."""

    direction: str
    num_bytes: int
    seconds: float
    error: str = ""
    is_timeout: bool = False


async def in_daemon_thread(function: Callable[[], ResultT], *, timeout_s: float) -> ResultT | Failure:
    """Run a blocking function; if it hangs, neither caller nor exit waits."""
    future: Future[ResultT] = Future()
    # From here on a waiter that leaves cancels no call, and the thread may still set its result.
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001 - handed to the waiter
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s)
    except TimeoutError:
        return Failure(kind=TIMEOUT, detail=f"no answer in {timeout_s:g} s{_busy()}")


def _busy() -> str:
    """The load, if this machine has more runnable threads than cores."""
    load, cores = os.getloadavg()[0], num_threads(0)
    return f"; this machine is busy, load {load:.0f} on {cores} cores" if load > cores else ""


async def resolve(host: str, port: int, *, timeout_s: float) -> tuple[str, ...] | Failure:
    """Addresses of a host, in the order in which they are tried."""

    def ask() -> tuple[str, ...] | Failure:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            return Failure(kind="unknown", detail=str(error))
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))

    return await in_daemon_thread(ask, timeout_s=timeout_s)


async def connect(addresses: Sequence[str], port: int, *, timeout_s: float) -> Connected | Failure:
    """Connect to the first address that accepts, or give the last failure.

    `timeout_s` is for each address. It takes addresses: a resolver that hangs would hold the loop's threads, for which
    the process waits.
    """
    trouble = Failure(kind="unreachable", detail="no address")
    for address in addresses:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(address, port)
        except TimeoutError:
            trouble = Failure(kind=TIMEOUT, detail=f"{address}: no answer in {timeout_s:g} s")
        except ConnectionRefusedError:
            trouble = Failure(kind="refused", detail=address)
        except OSError as error:
            trouble = Failure(kind="unreachable", detail=str(error))
        else:
            seconds = time.perf_counter() - started
            writer.close()
            return Connected(address=address, seconds=seconds)
    return trouble


async def tls_handshake(address: str, port: int, *, host: str, tls: TlsConfig, timeout_s: float) -> Handshake | Failure:
    """A TLS 1.3 handshake like gRPC's; the server must name `host`."""
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        return Failure(kind="files", detail=str(error))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address, port, ssl=context, server_hostname=host)
            der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            protocol = str(writer.get_extra_info("ssl_object").version())
            # In TLS 1.3 the server checks our certificate after our side is done; the first read has its verdict.
            first = await reader.read(1)
            writer.close()
    except TimeoutError:
        return Failure(kind=TIMEOUT, detail=f"no answer in {timeout_s:g} s")
    except ssl.SSLCertVerificationError as error:
        return Failure(kind=_VERIFY.get(error.verify_code, "authority"), detail=error.verify_message)
    except ssl.SSLError as error:
        reason = str(error.reason or error)
        return Failure(kind="refused_us" if "ALERT" in reason else "not_tls", detail=reason)
    except OSError as error:
        return Failure(kind="not_tls", detail=str(error))
    if not first:
        return Failure(kind="refused_us", detail="the server closed the connection after the handshake")
    identity = read_identity(x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM))
    return Handshake(protocol=protocol, server=identity if isinstance(identity, Identity) else None)


async def ask(
    client: DiagnosisClient, *, count: int, timeout_s: float, wall_time: Callable[[], float] = time.time
) -> Reached | Failure:
    """Ask the coordinator `count` times; the quickest answer compares the clocks."""
    answers: list[tuple[float, float, Diagnosis]] = []
    try:
        async with asyncio.timeout(timeout_s):
            # The first call also connects, so its time is not a round trip.
            await client.diagnose(timeout_s=timeout_s)
            for _ in range(count):
                sent, started = wall_time(), time.perf_counter()
                diagnosis = await client.diagnose(timeout_s=timeout_s)
                took = time.perf_counter() - started
                answers.append((took, diagnosis.server_time - (sent + took / 2), diagnosis))
    except TimeoutError:
        return Failure(kind=TIMEOUT, detail=f"no answer in {timeout_s:g} s")
    except HeterorlError as error:
        kind = "old" if "UNIMPLEMENTED" in str(error) else type(error).__name__
        return Failure(kind=kind, detail=str(error))
    took, ahead_s, _ = min(answers, key=lambda one: one[0])
    trips = tuple(one[0] for one in answers)
    return Reached(round_trips=trips, diagnosis=answers[-1][2], ahead_s=ahead_s, uncertainty_s=took / 2)


async def try_messages(client: DiagnosisClient, *, limit_bytes: int, timeout_s: float) -> tuple[MessageTrial, ...]:
    """Send growing messages both ways; a direction ends with its first loss."""
    trials = []
    for direction in ("up", "down"):
        largest = limit_bytes - OVERHEAD_BYTES
        if direction == "down":
            largest = min(largest, MAX_ANSWER_BYTES)
        for size in [*(size for size in SMALL_BYTES if size < largest), largest]:
            sizes = {"send_bytes": size} if direction == "up" else {"answer_bytes": size}
            started = time.perf_counter()
            error, is_timeout = "", False
            try:
                async with asyncio.timeout(timeout_s):
                    await client.diagnose(timeout_s=timeout_s, **sizes)
            except TimeoutError:
                error, is_timeout = f"not through in {timeout_s:g} s", True
            except HeterorlError as problem:
                error = str(problem)
                is_timeout = isinstance(problem, Unreachable) and "DEADLINE_EXCEEDED" in error
            seconds = time.perf_counter() - started
            trials.append(
                MessageTrial(direction=direction, num_bytes=size, seconds=seconds, error=error, is_timeout=is_timeout)
            )
            if error:
                break
    return tuple(trials)


EXPIRY_WARN_S = 14 * 86400.0
CLOCK_WARN_S = 5.0
"""Only the coordinator's clock counts for leases, so a smaller error than CLOCK_FAIL_S only misleads readers of logs.
"""
CLOCK_FAIL_S = 300.0
"""Fresh certificates are valid from this long before their creation, so a larger error makes them invalid."""
RTT_WARN_S = 1.0
_RENEW = "get a new one: `heterorl join` with a new token, or `heterorl certs renew` where the authority is"


def judge_dns(host: str, fact: tuple[str, ...] | Failure) -> Check:
    """Whether the name has an address."""
    if isinstance(fact, Failure):
        repair = "repair the DNS resolver of this machine (/etc/resolv.conf)"
        remedy = "correct the host in `coordinator`, or add it to DNS or /etc/hosts"
        return fail("dns", f"{host}: {fact.detail}", repair if fact.kind == TIMEOUT else remedy)
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return ok("dns", f"{host} is {', '.join(fact)}")
    return ok("dns", f"{host} is an address")


def judge_port(address: str, fact: Connected | Failure, *, is_own: bool = False) -> Check:
    """Whether something listens; `is_own` if it would be this node itself."""
    if not isinstance(fact, Failure):
        return ok("port", f"{address} accepts after {_ms(fact.seconds)}")
    if fact.kind == TIMEOUT:
        remedy = "open the coordinator's port in firewalls and security groups on the path"
        return fail("port", f"{address}: {fact.detail}", remedy)
    if fact.kind == "refused" and is_own:
        return warn("port", f"{address} refuses", "start the coordinator, then run the doctor again to check its link")
    if fact.kind == "refused":
        return fail("port", f"{address} refuses", "start the coordinator, or set the port of its `listen`")
    return fail("port", f"{address}: {fact.detail}", "correct the address or the routes: the machine is unreachable")


def judge_handshake(host: str, fact: Handshake | Failure) -> Check:
    """Whether both ends accept each other."""
    if isinstance(fact, Handshake):
        if fact.server is None or fact.server.role not in (Role.COORDINATOR, Role.RELAY):
            named = "not a node of a run" if fact.server is None else fact.server.uri
            remedy = "correct `coordinator`: the server there is not a coordinator or relay"
            return fail("tls", f"{fact.protocol}, the server is {named}", remedy)
        return ok("tls", f"{fact.protocol} with {fact.server.uri}")
    remedies = {
        TIMEOUT: "look for a proxy on the path: the port is open, but no handshake is answered",
        "files": "correct [tls]: the files of this node cannot be used",
        "authority": "copy ca.crt of the coordinator's authority to `tls.ca`: another authority signed its certificate",
        "hostname": f"dial a name in the coordinator's certificate, or issue a new one with `--host {host}`",
        "server_expired": "renew the coordinator's certificate with `heterorl certs renew`",
        "server_not_yet": "set this machine's clock: it is earlier than the coordinator's certificate",
        "refused_us": "get a certificate from the coordinator's authority: it refused this node's (expired or foreign)",
        "not_tls": "correct the port: what listens there does not speak TLS",
    }
    return fail("tls", f"{fact.kind.replace('_', ' ')}: {fact.detail}", remedies[fact.kind])


def judge_certificate(fact: Identity | Failure, *, role: Role, site: str, server: Identity | None) -> Check:
    """Whether the certificate is of this role, site and the coordinator's run."""
    if isinstance(fact, Failure):
        return fail("certificate", fact.detail, "correct [tls], or get new files with `heterorl join`")
    found = f"this node is {fact.uri}"
    if fact.role is not role:
        return fail("certificate", found, f"set [tls] to a certificate with role {role}")
    if site and fact.site != site:
        remedy = f"set `site` to {fact.site}, or get a certificate for {site}"
        return fail("certificate", f"{found}, `site` is {site}", remedy)
    if server is not None and server.run != fact.run:
        return fail("certificate", f"{found}, the coordinator's run is {server.run}", f"join run {server.run}")
    return ok("certificate", found)


def judge_expiry(fact: Identity | Failure, *, now: float) -> Check:
    """Whether the certificate is valid; `now` in seconds since the epoch."""
    if isinstance(fact, Failure):
        return skip("expiry", "the certificate was not read")
    left_s = fact.not_after - now
    if left_s <= 0:
        return fail("expiry", f"expired {_days(-left_s)} ago", _RENEW)
    if now < fact.not_before:
        return fail("expiry", f"begins in {_days(fact.not_before - now)}", "set this machine's clock")
    if left_s < EXPIRY_WARN_S:
        return warn("expiry", f"expires in {_days(left_s)}", _RENEW)
    return ok("expiry", f"expires in {_days(left_s)}")


def judge_revoked(fact: int | Failure | None) -> Check:
    """Whether a coordinator reads a revocation list; `fact` is its length."""
    if fact is None:
        remedy = "set `tls.revoked` to a copy of the list of `heterorl certs revoke`; an empty file revokes nothing"
        return warn("revoked", "tls.revoked is not set: a revoked certificate keeps working", remedy)
    if isinstance(fact, Failure):
        return fail("revoked", fact.detail, "copy the authority's `certs/revoked` there; an empty file revokes nothing")
    return ok("revoked", f"{amount(fact, 'certificate')} refused")


def judge_answer(fact: Reached | Failure) -> Check:
    """Whether the coordinator answers this node, and how fast."""
    if isinstance(fact, Reached):
        middle = statistics.median(fact.round_trips)
        found = f"run {fact.diagnosis.run_id}, {version_words(fact.diagnosis.head_version)}; round trip {_ms(middle)} "
        found += f"(median of {len(fact.round_trips)}, worst {_ms(max(fact.round_trips))})"
        if middle > RTT_WARN_S:
            return warn("coordinator", found, "look for a shorter path: the link is slow or overloaded")
        return ok("coordinator", found)
    remedies = {
        TIMEOUT: "read the coordinator's log: it accepts connections but does not answer",
        "Unauthenticated": "get a new certificate: the coordinator does not accept this one (revoked or expired)",
        "PermissionDenied": "get a certificate of the coordinator's run: this one belongs to another run",
        "ConfigError": "correct [tls] first: no call was made",
        "old": "install the same release of heterorl at both ends: the coordinator lacks this rpc",
    }
    generic = "read the logs of the coordinator and of proxies: the port is open, but the call failed"
    return fail("coordinator", f"{fact.detail}", remedies.get(fact.kind, generic))


def judge_clock(fact: Reached) -> Check:
    """Whether the clocks agree, within the uncertainty of the round trip."""
    off_s = max(0.0, abs(fact.ahead_s) - fact.uncertainty_s)
    off = f"{abs(fact.ahead_s):.3g} s" if abs(fact.ahead_s) >= 1 else _ms(abs(fact.ahead_s))
    found = f"{off} {'behind' if fact.ahead_s > 0 else 'ahead of'} the coordinator's"
    found += f" (+- {_ms(fact.uncertainty_s)})"
    remedy = "synchronise this machine's clock (`timedatectl set-ntp true`), and the coordinator's"
    if off_s > CLOCK_FAIL_S:
        return fail("clock", found, remedy)
    return warn("clock", found, remedy) if off_s > CLOCK_WARN_S else ok("clock", found)


def judge_messages(trials: Sequence[MessageTrial], *, own_limit: int, server_limit: int) -> Check:
    """Whether messages of the largest size get through both ways."""
    arrived = {way: [each for each in trials if each.direction == way and not each.error] for way in ("up", "down")}
    largest = {way: max((each.num_bytes for each in some), default=0) for way, some in arrived.items()}
    rates = {
        way: max((each.num_bytes / max(each.seconds, 1e-9) for each in some), default=0.0)
        for way, some in arrived.items()
    }
    found = "; ".join(f"{way} {_size(largest[way])} at {rates[way] / 1e6:.3g} MB/s" for way in arrived)
    lost = [trial for trial in trials if trial.error]
    if lost:
        found += f"; {_size(lost[0].num_bytes)} {lost[0].direction}: {lost[0].error}"
        if not lost[0].is_timeout:
            return fail("messages", found, "look for a proxy on the path that limits message size")
        if min(largest.values()) == 0:
            return fail("messages", found, "lower the interface's MTU to 1280: the path loses large packets")
        return warn("messages", found, "the link is slow: use a faster one, or smaller groups")
    if own_limit != server_limit:
        remedy = f"set max_message_bytes to the coordinator's {server_limit}, or that to this node's {own_limit}"
        return warn("messages", found, remedy)
    return ok("messages", found)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.0f} days" if seconds >= 2 * 86400 else f"{seconds / 3600:.1f} hours"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3g} MiB"
