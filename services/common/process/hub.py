"""Whether a hub of models refused, or is away for now."""

_CLIENTS = ("httpx", "httpx2", "requests")
"""HTTP clients of huggingface_hub, by release."""
_LATER = (408, 429)
"""Refusals of the moment."""


def is_away(error: BaseException | None) -> bool:
    """Whether a failure of huggingface_hub may pass, so that another start helps."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status >= 500 or status in _LATER
        if type(error).__module__.partition(".")[0] in _CLIENTS:
            return True
        error = error.__cause__
    return False
