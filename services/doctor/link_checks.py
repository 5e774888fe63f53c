"""The way to the coordinator: measures of name, port, handshake, round trips and messages, and pure judgements of them.

Guarantees: every measure ends within the seconds it is given, whatever the network does; nothing is sent but
handshakes and padding.
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
from dataclasses import dataclass
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from heterorl.common.errors import HeterorlError, Unreachable
from heterorl.common.identity.spiffe import Identity, Role, read_identity
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.process.threads import num_threads
from heterorl.common.rpc.maintenance import MAX_ANSWER_BYTES, OVERHEAD_BYTES, Diagnosis, DiagnosisClient
from heterorl.doctor.check import TIMEOUT, Check, Failure, fail, ok, skip, warn

ResultT = TypeVar("ResultT")
_IP_MTU, _IPV6_MTU = 14, 24
"""Socket options of Linux that Python does not name: the path's MTU as the kernel knows it."""
_VERIFY = {10: "server_expired", 9: "server_not_yet", 62: "hostname", 64: "hostname"}
"""OpenSSL's X509_V_ERR_* of a server's certificate; all others mean an authority that is not believed."""
SMALL_BYTES = (64 << 10, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The address that accepted, and the seconds that it took."""

    address: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """A finished handshake, and whom the server's certificate names; None for no identity of ours."""

    protocol: str
    server: Identity | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Answers of the coordinator: round trips in seconds, its facts, and how far its clock is ahead of ours."""

    round_trips: tuple[float, ...]
    diagnosis: Diagnosis
    ahead_s: float
    uncertainty_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTrial:
    """One message of a size in a direction (`up`, `down`); `error` is empty when it arrived."""

    direction: str
    num_bytes: int
    seconds: float
    error: str = ""
    is_timeout: bool = False


async def in_daemon_thread(function: Callable[[], ResultT], *, timeout_s: float) -> ResultT | Failure:
    """Run a blocking function in a thread that nobody waits for when it hangs, not even the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()

    def put(result: ResultT | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type] # a result comes without an error
        else:
            future.set_exception(error)

    def work() -> None:
        try:
            result, error = function(), None
        except Exception as failure:  # noqa: BLE001 - handed to the waiter
            result, error = None, failure
        # A loop that has ended meanwhile has no use for it.
        if not loop.is_closed():
            loop.call_soon_threadsafe(put, result, error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return await asyncio.wait_for(future, timeout_s)
    except TimeoutError:
        return Failure(kind=TIMEOUT, detail=f"no answer in {timeout_s:g} s{_busy()}")


def _busy() -> str:
    """How busy this machine is, where more wants to run than it has cores."""
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
    """Connect to the first address that accepts, each in its time; the last one's trouble where none does.

    Addresses, not names: a resolver that hangs would hold the loop's own threads, which the process waits for.
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
    """A TLS 1.3 handshake with this node's certificate, as gRPC would do it; the server's is to name `host`."""
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
            # In TLS 1.3 the server judges our certificate when our side is done: its verdict is the first read.
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
        return Failure(kind="closed", detail=str(error))
    if not first:
        return Failure(kind="refused_us", detail="the server closed the connection after the handshake")
    identity = read_identity(x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM))
    return Handshake(protocol=protocol, server=identity if isinstance(identity, Identity) else None)


async def ask(
    client: DiagnosisClient, *, count: int, timeout_s: float, wall_time: Callable[[], float] = time.time
) -> Reached | Failure:
    """Ask the coordinator `count` times; the clocks are compared in the quickest round trip."""
    trips: list[float] = []
    best: tuple[float, float] | None = None
    diagnosis: Diagnosis | None = None
    try:
        async with asyncio.timeout(timeout_s):
            # The first call dials; its time says nothing about the round trip.
            await client.diagnose(timeout_s=timeout_s)
            for _ in range(count):
                sent, started = wall_time(), time.perf_counter()
                diagnosis = await client.diagnose(timeout_s=timeout_s)
                took = time.perf_counter() - started
                trips.append(took)
                if best is None or took < best[0]:
                    best = took, diagnosis.server_time - (sent + took / 2)
    except TimeoutError:
        return Failure(kind=TIMEOUT, detail=f"no answer in {timeout_s:g} s")
    except HeterorlError as error:
        kind = "old" if "UNIMPLEMENTED" in str(error) else type(error).__name__
        return Failure(kind=kind, detail=str(error))
    assert diagnosis is not None
    assert best is not None
    return Reached(round_trips=tuple(trips), diagnosis=diagnosis, ahead_s=best[1], uncertainty_s=best[0] / 2)


async def try_messages(client: DiagnosisClient, *, limit_bytes: int, timeout_s: float) -> tuple[MessageTrial, ...]:
    """Messages of growing size in both directions, up to the largest allowed; a direction ends with its first loss."""
    trials = []
    for direction in ("up", "down"):
        largest = limit_bytes - OVERHEAD_BYTES
        if direction == "down":
            # The coordinator sends no more to whoever asks.
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


async def path_mtu(address: str, port: int, *, timeout_s: float) -> int | Failure:
    """Largest packet on the way, bytes, as the kernel knows it by now."""

    def measure() -> int | Failure:
        try:
            with socket.create_connection((address, port), timeout=timeout_s) as link:
                if link.family == socket.AF_INET6:
                    return link.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
                return link.getsockopt(socket.IPPROTO_IP, _IP_MTU)
        except OSError as error:
            return Failure(kind="unknown", detail=str(error))

    return await in_daemon_thread(measure, timeout_s=timeout_s)


EXPIRY_WARN_S = 14 * 86400.0
CLOCK_WARN_S = 5.0
"""Ages and leases are the coordinator's alone; only people who compare logs are misled by less than CLOCK_FAIL_S."""
CLOCK_FAIL_S = 300.0
"""How far ahead an authority's clock may be: a fresh certificate begins this long before it was made."""
MTU_WARN_BYTES = 1280
RTT_WARN_S = 1.0
_RENEW = "get a new one: `heterorl join` with a new token, or `heterorl certs renew` where the authority is"


def judge_dns(host: str, fact: tuple[str, ...] | Failure) -> Check:
    """Whether the name has an address."""
    if isinstance(fact, Failure):
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


def judge_port(address: str, fact: Connected | Failure, *, is_own: bool = False) -> Check:
    """Whether something listens; `is_own`: it would be this node itself."""
    if not isinstance(fact, Failure):
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


def judge_handshake(host: str, fact: Handshake | Failure) -> Check:
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


def judge_certificate(fact: Identity | Failure, *, role: Role, site: str, server: Identity | None) -> Check:
    """Whether this node's certificate is of its role, its site and the coordinator's run; `site` empty: any."""
    if isinstance(fact, Failure):
        return fail("certificate", fact.detail, "correct [tls], or get the files anew with `heterorl join`")
    found = f"this node is {fact.uri}"
    if fact.role is not role:
        return fail("certificate", found, f"put a certificate for role {role} into [tls]")
    if site and fact.site != site:
        return fail("certificate", f"{found}, `site` is {site}", f"set `site` to {fact.site}, or get one for {site}")
    if server is not None and server.run != fact.run:
        return fail("certificate", f"{found}, the coordinator's run is {server.run}", f"join run {server.run}")
    return ok("certificate", found)


def judge_expiry(fact: Identity | Failure, *, now: float) -> Check:
    """Whether the certificate is valid, and for how long; `now` in seconds since the epoch."""
    if isinstance(fact, Failure):
        return skip("expiry", "no certificate was read")
    left_s = fact.not_after - now
    if left_s <= 0:
        return fail("expiry", f"expired {_days(-left_s)} ago", _RENEW)
    if now < fact.not_before:
        return fail("expiry", f"begins in {_days(fact.not_before - now)}", "set this machine's clock")
    if left_s < EXPIRY_WARN_S:
        return warn("expiry", f"expires in {_days(left_s)}", _RENEW)
    return ok("expiry", f"expires in {_days(left_s)}")


def judge_revoked(fact: int | Failure | None) -> Check:
    """Whether a coordinator reads a list of revoked certificates: how many are on it; None where none is named."""
    if fact is None:
        remedy = "set `tls.revoked` to a copy of the authority's list (an empty file is none): `heterorl certs revoke`"
        return warn("revoked", "tls.revoked is not set: a revoked certificate goes on working", f"{remedy} writes it")
    if isinstance(fact, Failure):
        return fail("revoked", fact.detail, "copy the authority's `certs/revoked` there; an empty file is none")
    return ok("revoked", f"{fact} certificates are refused")


def judge_answer(fact: Reached | Failure) -> Check:
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


def judge_messages(trials: Sequence[MessageTrial], *, own_limit: int, server_limit: int) -> Check:
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


def judge_mtu(fact: int | Failure) -> Check:
    """A hint: the largest packet that the kernel sends on this way."""
    if isinstance(fact, Failure):
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
