"""Identity of nodes and versions: certificates, SPIFFE names, revocation, signing keys.

A peer is exactly one URI of its certificate; a version is accepted by its signature only. Open `spiffe` first.
"""
