"""How urgent a request is: from its `priority`, its `service_tier` and the API key it came with. Pure."""

import hashlib

from ..core.errors import RequestError
from ..core.request import DEFAULT_PRIORITY, Urgency

PRIORITIES = (-DEFAULT_PRIORITY, DEFAULT_PRIORITY)  # of the API, where 0 is usual and lower is sooner
_KEY_DIGITS = 16

# What clients may ask for |-> (what the answer says was given, classes higher, is batch).
_TIERS = {
    "auto": ("default", 0, False),
    "default": ("default", 0, False),
    "priority": ("priority", 1, False),
    "flex": ("flex", 0, True),
}


def given_tier(service_tier: str | None) -> str | None:
    """What an answer says of the tier; None when the client did not name one. Raises RequestError for others."""
    if service_tier is None:
        return None
    if service_tier not in _TIERS:
        raise RequestError(f"service_tier must be one of {', '.join(_TIERS)}", "service_tier")
    return _TIERS[service_tier][0]


def urgency_of(priority: int, tier: str | None, api_key: str) -> Urgency:
    """`priority` is in PRIORITIES, `tier` as `given_tier` says, `api_key` as the client sent it, "" none.

    The key is a digest: who shares fairly must be told apart, but a worker need not see anybody's API key.
    """
    _, num_higher, is_batch = _TIERS[tier or "default"]
    key = hashlib.sha256(api_key.encode(errors="surrogateescape")).hexdigest()[:_KEY_DIGITS] if api_key else ""
    return Urgency(max(priority + DEFAULT_PRIORITY - num_higher, 0), key, is_batch)


def batch_urgency(priority: int, owner: str) -> Urgency:
    """Of a line of a batch; `owner` as in keys.py, so that one who sends batches and requests shares as one."""
    return Urgency(priority + DEFAULT_PRIORITY, owner[:_KEY_DIGITS], is_batch=True)
