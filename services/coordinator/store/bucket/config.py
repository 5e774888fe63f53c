"""Configuration of a bucket for payloads."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from heterorl.common.process.address import split_url
from heterorl.common.process.config import Config


class BucketConfig(Config):
    """Where payloads are kept, beside what `store` keeps."""

    bucket: str = Field(default="", pattern=r"^([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])?$")
    """Name of an S3-compatible bucket, which exists; empty: payloads are files in data_dir. Chosen when a run begins.
    Its credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the machine's role, or credentials_file."""
    prefix: str = Field(default="", pattern=r"^([A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*)?$", max_length=256)
    """What the keys of this run begin with; empty: run_id. One run alone may use it."""
    endpoint: str = Field(default="", max_length=512)
    """`https://HOST[:PORT]` of a store that is not Amazon's; `http://` only within a network that is trusted."""
    region: str = Field(default="us-east-1", pattern=r"^[A-Za-z0-9-]{1,64}$")
    """Region that requests are signed for."""
    credentials_file: Path | None = None
    """File in the form of ~/.aws/credentials, section `default`; readable by its owner alone (mode 0600)."""
    cache_bytes: int = Field(default=64 << 30, ge=1 << 20)
    """Bytes of data_dir for copies and for uploads under way. What one reader alone needs at once may exceed it; all
    others wait then. Give it room for the largest payload, and for a snapshot with its deltas, which are read to verify
    versions."""
    url_lifetime_s: float = Field(default=3600.0, ge=60.0, le=604800.0)
    """How long an address that a plan gives to a node can be read from, seconds."""
    put_bytes: int = Field(default=64 << 30, ge=0)
    """Largest payload that a learner puts into the bucket itself, in pieces of 64 MiB, instead of sending it through
    the coordinator, which verifies it before anybody sees it; 0: all come through the coordinator."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        parts = split_url(endpoint)
        if not endpoint:
            return endpoint
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise ValueError("must be https://HOST or https://HOST:PORT")
        if parts.username is not None or parts.query or parts.fragment:
            # Said without the value: whoever wrote a key into it may not want it in a log.
            raise ValueError("has credentials or parameters: they belong into credentials_file or the environment")
        return endpoint.rstrip("/")
