"""Protobuf <-> lists of kept samples: what is asked for, and a page of it."""

from __future__ import annotations

import math

from heterorl.common.errors import InvalidRequest
from heterorl.common.types.common import SiteId
from heterorl.common.types.sample import MAX_PAGE, SampleFilter, SampleList, SamplePage
from heterorl.common.wire.sample import kind_from_pb, kind_to_pb, summary_from_pb, summary_to_pb
from heterorl.v1 import sample_pb2

_OPTIONAL = ("first_version", "last_version", "min_reward", "max_reward", "is_truncated")


def list_request_to_pb(wanted: SampleFilter, page: SamplePage) -> sample_pb2.ListSamplesRequest:
    """Convert what is asked for."""
    stated = {name: got for name in _OPTIONAL if (got := getattr(wanted, name)) is not None}
    return sample_pb2.ListSamplesRequest(
        site=wanted.site,
        kind=kind_to_pb(wanted.kind),
        kept_because=wanted.kept_because,
        limit=page.limit,
        before=page.before,
        after=page.after,
        is_oldest_first=page.is_oldest_first,
        **stated,
    )


def list_request_from_pb(message: sample_pb2.ListSamplesRequest) -> tuple[SampleFilter, SamplePage]:
    """Convert what is asked for.

    Raises:
        InvalidRequest: the kind is newer than this program, a number is none, or the page is too long.
    """
    kind = kind_from_pb(message.kind)
    if kind is None and message.kind:
        raise InvalidRequest(f"kind: {message.kind} is not a kind")
    stated = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}  # type: ignore[arg-type]
    for name in ("min_reward", "max_reward"):
        if math.isnan(stated.get(name, 0.0)):
            raise InvalidRequest(f"{name}: not a number")
    check_limit(message.limit)
    wanted = SampleFilter(site=SiteId(message.site), kind=kind, kept_because=message.kept_because, **stated)
    page = SamplePage(
        limit=message.limit, before=message.before, after=message.after, is_oldest_first=message.is_oldest_first
    )
    return wanted, page


def check_limit(limit: int) -> None:
    """Refuse a page that is too long, or none.

    Raises:
        InvalidRequest: it is.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit: {limit} is not in 1..{MAX_PAGE}")


def list_to_pb(value: SampleList) -> sample_pb2.ListSamplesResponse:
    """Convert a page."""
    message = sample_pb2.ListSamplesResponse(
        samples=[summary_to_pb(summary) for summary in value.samples],
        num_kept=value.num_kept,
        kept_bytes=value.kept_bytes,
        limit_bytes=value.limit_bytes,
    )
    if value.next_page is not None:
        message.looked_up_to = value.next_page.after if value.next_page.is_oldest_first else value.next_page.before
    return message


def list_from_pb(message: sample_pb2.ListSamplesResponse, page: SamplePage) -> SampleList:
    """Convert the answer to the question for a page."""
    following = None
    if message.HasField("looked_up_to"):
        following = next_page(page, message.looked_up_to)
    return SampleList(
        samples=tuple(summary_from_pb(summary) for summary in message.samples),
        next_page=following,
        num_kept=message.num_kept,
        kept_bytes=message.kept_bytes,
        limit_bytes=message.limit_bytes,
    )


def next_page(page: SamplePage, looked_up_to: int) -> SamplePage:
    """The page behind one that ended at an id."""
    before, after = (page.before, looked_up_to) if page.is_oldest_first else (looked_up_to, page.after)
    return SamplePage(limit=page.limit, before=before, after=after, is_oldest_first=page.is_oldest_first)
