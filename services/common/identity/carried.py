"""Nodes behind a relay: whose certificate travels with a call, and which ones a relay may carry. Decisions are pure.

A relay proves itself by the handshake and shows the certificate of the node that called it, so that role, site,
lifetime and revocation are judged of the node as if it had called itself. What a relay cannot show is a node that the
authority never made; what it can do is to act as any node of its own site whose certificate it has seen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from heterorl.common.identity.identity import Identity, Refusal, RefusalReason, Role, read_identity

NODE_KEY = "heterorl-node-bin"
"""Metadata of a call that a relay carries: the certificate of the node whose call it is, PEM."""
MAX_CERTIFICATE_BYTES = 4096


def is_within(site: str, *, relay_site: str) -> bool:
    """Whether a node of `site` is of the relay's own: `eu`, or below it, as `eu.gpu1`."""
    return site == relay_site or site.startswith(f"{relay_site}.")


def refuse_node(relay: Identity, node: Identity) -> Refusal | None:
    """Decide whether a relay may carry a node's calls; None is yes."""
    if node.run != relay.run:
        return Refusal(reason=RefusalReason.RUN, message=f"the node is of run {node.run}, the relay of {relay.run}")
    if node.role is not Role.SAMPLER:
        message = f"a relay carries samplers, this is a {node.role}: let it dial the coordinator itself"
        return Refusal(reason=RefusalReason.ROLE, message=message)
    if not is_within(node.site, relay_site=relay.site):
        message = f"the relay of {relay.site} carries {relay.site} and {relay.site}.*, not {node.site}"
        return Refusal(reason=RefusalReason.SITE, message=message)
    return None


def carried(relay: Identity, shown: Sequence[bytes], authorities: bytes) -> Identity | Refusal:
    """The node whose call a peer says it carries.

    Args:
        relay: the other end of the link, as its own certificate names it.
        shown: values of NODE_KEY.
        authorities: PEM of the authorities whose certificates are believed.
    """
    if relay.role is not Role.RELAY:
        message = f"a {relay.role} carries no other node's calls"
        return Refusal(reason=RefusalReason.ROLE, message=message)
    if len(shown) != 1 or len(shown[0]) > MAX_CERTIFICATE_BYTES:
        return Refusal(reason=RefusalReason.NO_IDENTITY, message="the relay must show exactly one certificate")
    node = _vouched(shown[0], authorities)
    refusal = node if isinstance(node, Refusal) else refuse_node(relay, node)
    if isinstance(node, Refusal) or refusal is not None:
        return refusal or node
    return dataclasses.replace(node, through=relay)


@functools.lru_cache(maxsize=4096)
def _vouched(pem: bytes, authorities: bytes) -> Identity | Refusal:
    node = read_identity(pem)
    if isinstance(node, Refusal):
        return node
    certificate = x509.load_pem_x509_certificate(pem)
    for authority in x509.load_pem_x509_certificates(authorities):
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return node
    message = f"the certificate of {node.uri} was issued by no authority in tls.ca"
    return Refusal(reason=RefusalReason.NO_IDENTITY, message=message)
