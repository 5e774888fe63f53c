"""Whose versions a node accepts: the signature of a manifest against the keys that it trusts.

A signed manifest names its parent by digest, so one signature vouches for the whole history behind it. Several keys may
be trusted at once: that is how a learner's key is exchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from heterorl.common.errors import UnsignedManifest, WrongSignature
from heterorl.common.identity.signing import signed_by

_LOG = logging.getLogger(__name__)
UNSIGNED = "unsigned"
"""What the state shows of a version that no key was asked about."""


class Trust:
    """The keys of one node; none means that every manifest is accepted, which is said once."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = tuple(dict.fromkeys(keys))
        self._has_warned = False

    def check(self, data: bytes, signature: bytes, *, version: int) -> str:
        """Accept the exact bytes of a manifest, or refuse them.

        Returns:
            The trusted key that signed them; UNSIGNED where no key is trusted, for then nothing was proven.

        Raises:
            UnsignedManifest: keys are trusted and there is no signature.
            WrongSignature: the signature is of none of them, or of other bytes.
        """
        if not self._keys:
            if not self._has_warned:
                self._has_warned = True
                _LOG.warning("trusted_keys is empty: whoever controls the coordinator can replace the weights")
            return UNSIGNED
        if not signature:
            raise UnsignedManifest(f"the manifest of version {version} is not signed")
        key = signed_by(data, signature, self._keys)
        if key is None:
            raise WrongSignature(f"the signature of version {version} is of none of the {len(self._keys)} trusted keys")
        return key
