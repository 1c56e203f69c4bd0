"""What the policy decides. The live scheduler turns actions into messages, the simulator into events.

Values, though not frozen: making a frozen one takes four times as long, and there is a Start for each request.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ErrorCode
from common.types import ReadPath, RequestKey


@dataclass(slots=True)
class Start:
    """Both engines are chosen, and the side that reads the hit blocks: the read starts now.

    pe_tokens: so many of the hit tokens, from the first one on, are read on the prefill side (whole blocks; PE path:
    all, DE path: none), the others on the decode side.
    """

    key: RequestKey
    prefill: str
    decode: str
    read_path: ReadPath
    pe_tokens: int


@dataclass(slots=True)
class CancelOn:
    """This engine must drop the request and release what it holds of it."""

    key: RequestKey
    engine: str


@dataclass(slots=True)
class Fail:
    """Tell the front end that this attempt has ended badly."""

    key: RequestKey
    code: ErrorCode
    detail: str


Action = Start | CancelOn | Fail
