"""Who is who: certificates, the names in them, their revocation, and the keys that sign versions.

A peer is exactly one URI of its certificate; a version is accepted by its signature alone. Open `spiffe` first.
"""
