"""MessagePack codec for control messages: typed both ways, bounded, and never code.

A message is a frozen dataclass registered in common.messages. On the wire it is [tag, {field: value}]. Decoding checks
the tag, every field's type and the size limits; anything else raises WireError and the frame is counted and dropped.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import msgpack
from pydantic import ConfigDict, TypeAdapter, ValidationError

#: Raised by one on every incompatible change of a message or of the data plane.
PROTOCOL_VERSION = 2
#: Largest control frame, bytes: room for a prompt of a few million tokens, no more. Bulk bytes never travel here.
MAX_FRAME_BYTES = 32 << 20
MAX_ITEMS = 1 << 20

T = TypeVar("T", bound=type)


class WireError(ValueError):
    """A frame that is not a well-formed message."""


_adapters: dict[str, TypeAdapter[Any]] = {}


def message(cls: T) -> T:
    """Class decorator: the dataclass may travel. Its class name is its tag."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid", defer_build=True)  # type: ignore[attr-defined]
    _adapters[cls.__name__] = TypeAdapter(cls)
    return cls


def _to_plain(value: object) -> object:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TypeError(f"{type(value).__name__} cannot travel in a message")


def encode(msg: object) -> bytes:
    """A registered message as bytes. TypeError for anything else, WireError if it is too large."""
    tag = type(msg).__name__
    if tag not in _adapters:
        raise TypeError(f"{tag} is not a registered message")
    raw: bytes = msgpack.packb([tag, _to_plain(msg)], default=_to_plain)
    if len(raw) > MAX_FRAME_BYTES:
        raise WireError(f"{tag} of {len(raw)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return raw


def decode(raw: bytes | memoryview) -> Any:
    """The message in a frame. WireError for anything that is not exactly one."""
    if len(raw) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(raw)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        parsed = msgpack.unpackb(
            raw,
            strict_map_key=True,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
        tag, body = parsed
        adapter = _adapters[tag]
        return adapter.validate_python(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise WireError(f"{parsed[0]}: {where}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a message: {type(error).__name__}: {error}") from None
