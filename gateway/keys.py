"""ApiKeys: who may use this server. Only digests of the keys are kept, so that no log or dump tells one."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from ..core.errors import RequestError


def digest_of(api_key: str) -> str:
    return hashlib.sha256(api_key.encode(errors="surrogateescape")).hexdigest()


def owner_of(api_key: str) -> str:
    """Whose something is that came with this key: what can be stored. Without keys all are one."""
    return digest_of(api_key) if api_key else ""


def sent_key(headers: Mapping[str, str]) -> str:
    """The key a request came with, as OpenAI's clients or Anthropic's send it; "" when there is none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return bearer or headers.get("X-Api-Key", "").strip()


class ApiKeys:
    """`digests`: of all keys that are good; none at all means that the server asks for no key."""

    def __init__(self, digests: Sequence[str]):
        self._digests = tuple(digests)

    def check(self, headers: Mapping[str, str]) -> str:
        """The key of the request, "" when none is asked for. Raises RequestError (401).

        How long it takes tells nothing: digests are compared in constant time, and always all of them.
        """
        if not self._digests:
            return ""
        key = sent_key(headers)
        given = digest_of(key)
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not key:
            raise RequestError(
                "this server needs an API key: send `Authorization: Bearer KEY`", None, "invalid_api_key", 401
            )
        if True not in known:
            raise RequestError("this API key is not known here; ask who runs this server", None, "invalid_api_key", 401)
        return key
