"""Who may call, and as whom: API keys and their tenants.

A tenant's salt goes into the key of every block of its prompts (common.blocks.hashing), so nobody's latency tells
anything of what another tenant has asked. Without a file of keys everybody is one tenant.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from common.errors import ConfigError
from services.frontend.errors import ApiError

DIGEST_PREFIX = "sha256:"


@dataclass(frozen=True, slots=True)
class Tenant:
    """max_pending: how many of its requests may be in hand at once; 0: as many as there are places."""

    name: str = ""
    salt: bytes = b""
    max_pending: int = 0


EVERYBODY = Tenant()


class _Entry(BaseModel):
    """A tenant in the file. keys: each as it is sent, or sha256: and the hex digest of it. salt: default: its name."""

    model_config = ConfigDict(extra="forbid")

    keys: list[str] = Field(min_length=1)
    salt: str = ""
    max_pending: int = Field(default=0, ge=0)


_File = TypeAdapter(dict[str, _Entry])


class Tenants:
    """by_digest: SHA-256 of each key -> whose it is; empty: no key is needed.

    A key is looked up by its digest, so that how long it takes tells nothing about the keys there are.
    """

    def __init__(self, by_digest: dict[bytes, Tenant] | None = None) -> None:
        self._by_digest = by_digest or {}

    @property
    def need_keys(self) -> bool:
        return bool(self._by_digest)

    def find(self, authorization: str | None) -> Tenant:
        """The tenant of an Authorization header. ApiError 401 for a key that is missing or unknown."""
        if not self.need_keys:
            return EVERYBODY
        scheme, _, key = (authorization or "").partition(" ")
        tenant = self._by_digest.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            message = "a valid API key is needed: send it as 'Authorization: Bearer KEY'"
            raise ApiError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return tenant


def load_tenants(path: str) -> Tenants:
    """Read a TOML file with a table for each tenant; no path: no keys. ConfigError, never with a key in it, for a file
    that cannot be used. Blocks."""
    if not path:
        return Tenants()
    try:
        entries = _File.validate_python(tomllib.loads(Path(path).read_text()))
    except OSError as error:
        raise ConfigError(f"frontend.api_keys: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise ConfigError(f"frontend.api_keys: {path} is not TOML") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"frontend.api_keys: {path}: {where}: {first['msg']}") from None
    by_digest: dict[bytes, Tenant] = {}
    for name, entry in entries.items():
        tenant = Tenant(name, (entry.salt or name).encode(), entry.max_pending)
        for number, key in enumerate(entry.keys):
            digest = _stored_digest(key)
            if digest is None or digest in by_digest:
                problem = "is no key, nor sha256: and 64 hex digits" if digest is None else "is somebody's already"
                raise ConfigError(f"frontend.api_keys: {path}: {name}.keys.{number} {problem}")
            by_digest[digest] = tenant
    if not by_digest:
        raise ConfigError(f"frontend.api_keys: {path} has no tenant: nobody could call")
    return Tenants(by_digest)


def _stored_digest(key: str) -> bytes | None:
    if not key.startswith(DIGEST_PREFIX):
        return _digest(key) if key and key == key.strip() else None
    try:
        digest = bytes.fromhex(key.removeprefix(DIGEST_PREFIX))
    except ValueError:
        return None
    return digest if len(digest) == hashlib.sha256().digest_size else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
