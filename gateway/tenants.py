"""Who shares cached prefixes with whom: the namespace of a request, by its API key and `cache_salt`. Pure."""

import hashlib
import hmac
import secrets

import msgspec

from ..transfer.keys import ClusterKeys
from .keys import owner_of


class Tenants:
    """Namespaces of one model. All gateways of a cluster give the same ones, because they have the same key file."""

    def __init__(self, model_digest: str, key_file: str):
        """`key_file` "": a secret of this process alone. Raises ConfigurationError as ClusterKeys.load."""
        self._model_digest = model_digest
        self._secret = ClusterKeys.load(key_file).secret.encode() if key_file else secrets.token_bytes(32)

    def namespace(self, api_key: str, cache_salt: str | None) -> str:
        """`api_key`: a key that was checked, "" when this server asks for none.

        Without either, all clients share. A salt divides the requests of one key further, and cannot name anybody
        else's part: what a client sends only goes through a keyed digest, together with the key.
        """
        return self.namespace_of(owner_of(api_key), cache_salt)

    def namespace_of(self, owner: str, cache_salt: str | None) -> str:
        """As `namespace`, where the key is not at hand but who its owner is (see keys.py)."""
        if not owner and cache_salt is None:
            return self._model_digest
        who = msgspec.json.encode([owner, cache_salt])
        return f"{self._model_digest}.{hmac.new(self._secret, who, hashlib.sha256).hexdigest()[:32]}"
