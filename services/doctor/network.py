"""Measures the way to the coordinator: names, port, handshake, round trips, message sizes. Decides nothing.

Guarantees: every function ends within the seconds it is given, whatever the network does; nothing is sent but
handshakes and padding.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from heterorl.common.errors import HeterorlError, Unreachable
from heterorl.common.identity.identity import Identity, read_identity
from heterorl.common.identity.tls import TlsConfig
from heterorl.common.rpc.roles import MAX_ANSWER_BYTES, OVERHEAD_BYTES, Diagnosis, DiagnosisClient
from heterorl.common.weights.parallel import num_threads
from heterorl.doctor.check import TIMEOUT, Trouble

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
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Answers of the coordinator: round trips in seconds, its facts, and how far its clock is ahead of ours."""

    round_trips: tuple[float, ...]
    diagnosis: Diagnosis
    ahead_s: float
    uncertainty_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One message of a size in a direction (`up`, `down`); `error` is empty when it arrived."""

    direction: str
    num_bytes: int
    seconds: float
    error: str = ""
    is_timeout: bool = False


async def in_forgotten_thread(function: Callable[[], ResultT], *, timeout_s: float) -> ResultT | Trouble:
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
        return Trouble(kind=TIMEOUT, detail=f"no answer in {timeout_s:g} s{_busy()}")


def _busy() -> str:
    """How busy this machine is, where more wants to run than it has cores."""
    load, cores = os.getloadavg()[0], num_threads(0)
    return f"; this machine is busy, load {load:.0f} on {cores} cores" if load > cores else ""


async def resolve(host: str, port: int, *, timeout_s: float) -> tuple[str, ...] | Trouble:
    """Addresses of a host, in the order in which they are tried."""

    def ask() -> tuple[str, ...] | Trouble:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            return Trouble(kind="unknown", detail=str(error))
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))

    return await in_forgotten_thread(ask, timeout_s=timeout_s)


async def connect(addresses: Sequence[str], port: int, *, timeout_s: float) -> Connected | Trouble:
    """Connect to the first address that accepts, each in its time; the last one's trouble where none does.

    Addresses, not names: a resolver that hangs would hold the loop's own threads, which the process waits for.
    """
    trouble = Trouble(kind="unreachable", detail="no address")
    for address in addresses:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(address, port)
        except TimeoutError:
            trouble = Trouble(kind=TIMEOUT, detail=f"{address}: no answer in {timeout_s:g} s")
        except ConnectionRefusedError:
            trouble = Trouble(kind="refused", detail=address)
        except OSError as error:
            trouble = Trouble(kind="unreachable", detail=str(error))
        else:
            seconds = time.perf_counter() - started
            writer.close()
            return Connected(address=address, seconds=seconds)
    return trouble


async def shake_hands(address: str, port: int, *, host: str, tls: TlsConfig, timeout_s: float) -> Handshake | Trouble:
    """A TLS 1.3 handshake with this node's certificate, as gRPC would do it; the server's is to name `host`."""
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        return Trouble(kind="files", detail=str(error))
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
        return Trouble(kind=TIMEOUT, detail=f"no answer in {timeout_s:g} s")
    except ssl.SSLCertVerificationError as error:
        return Trouble(kind=_VERIFY.get(error.verify_code, "authority"), detail=error.verify_message)
    except ssl.SSLError as error:
        reason = str(error.reason or error)
        return Trouble(kind="refused_us" if "ALERT" in reason else "not_tls", detail=reason)
    except OSError as error:
        return Trouble(kind="closed", detail=str(error))
    if not first:
        return Trouble(kind="refused_us", detail="the server closed the connection after the handshake")
    certificate = x509.load_der_x509_certificate(der)
    identity = read_identity(certificate.public_bytes(Encoding.PEM))
    return Handshake(
        protocol=protocol, server=identity if isinstance(identity, Identity) else None, hosts=_hosts(certificate)
    )


async def ask(
    client: DiagnosisClient, *, count: int, timeout_s: float, wall_time: Callable[[], float] = time.time
) -> Reached | Trouble:
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
        return Trouble(kind=TIMEOUT, detail=f"no answer in {timeout_s:g} s")
    except HeterorlError as error:
        kind = "old" if "UNIMPLEMENTED" in str(error) else type(error).__name__
        return Trouble(kind=kind, detail=str(error))
    assert diagnosis is not None
    assert best is not None
    return Reached(round_trips=tuple(trips), diagnosis=diagnosis, ahead_s=best[1], uncertainty_s=best[0] / 2)


async def try_messages(client: DiagnosisClient, *, limit_bytes: int, timeout_s: float) -> tuple[Trial, ...]:
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
                Trial(direction=direction, num_bytes=size, seconds=seconds, error=error, is_timeout=is_timeout)
            )
            if error:
                break
    return tuple(trials)


async def path_mtu(address: str, port: int, *, timeout_s: float) -> int | Trouble:
    """Largest packet on the way, bytes, as the kernel knows it by now."""

    def measure() -> int | Trouble:
        try:
            with socket.create_connection((address, port), timeout=timeout_s) as link:
                if link.family == socket.AF_INET6:
                    return link.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
                return link.getsockopt(socket.IPPROTO_IP, _IP_MTU)
        except OSError as error:
            return Trouble(kind="unknown", detail=str(error))

    return await in_forgotten_thread(measure, timeout_s=timeout_s)


def _hosts(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))
