"""KV on its way: engine <-> its traffic manager, and traffic manager <-> traffic manager."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ErrorCode
from common.transport.region import RegionDescriptor
from common.types import ReadPath, RequestKey, Role
from common.wire import message

# ---- engine <-> its traffic manager --------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class Attach:
    """engine -> traffic manager, call, once: its role and device memory, and the staging buffer to take, in bytes.

    Answered by Attached.
    """

    incarnation: str
    role: Role
    device_memory: RegionDescriptor
    buffer_bytes: int


@message
@dataclass(frozen=True, slots=True)
class Attached:
    buffer_blocks: int
    incarnation: str


@message
@dataclass(frozen=True, slots=True)
class Stage:
    """engine -> traffic manager: reserve staging buffer for a request and read hit blocks.

    keys: of the blocks to read, if any: the prompt's block number `first` and those behind it. blocks: slots to
    reserve, from the prompt's start (decode side, and the prefill side on its own path: the whole prompt; the prefill
    side of a split read: its own part). path: how the request as a whole is read. peer / peer_incarnation: control
    endpoint and incarnation of the other side's traffic manager.
    """

    request_id: str
    attempt: int
    blocks: int
    first: int
    keys: bytes
    path: ReadPath
    peer: str
    peer_incarnation: str


@message
@dataclass(frozen=True, slots=True)
class Ready:
    """prefill traffic manager -> prefill engine: both sides are staged; cached_tokens of KV are there.

    allocation_s: from Stage to the first byte read; read_s: from there to the last hit block (the slower side's).
    """

    request_id: str
    attempt: int
    cached_tokens: int
    allocation_s: float
    read_s: float


@message
@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """A sequence's place in a forward batch: rows [row, row + cached + new) of each layer slot; cached come first.

    last: no chunk of this request follows.
    """

    request_id: str
    attempt: int
    row: int
    cached: int
    new: int
    last: bool


@message
@dataclass(frozen=True, slots=True)
class BeginForward:
    """prefill engine -> its traffic manager: plan of one layerwise forward (paper §4.1).

    Layer l lives in slot l % num_slots; slot s starts at byte base + s * rows * row_bytes of device memory. Layers are
    handed over in steps: step s is layers [s * layers_per_step, (s + 1) * layers_per_step), and num_slots is a multiple
    of layers_per_step. Several forwards may be in hand, each in device memory of its own. The traffic manager loads the
    cached rows of steps in order, each as soon as its slots are free, and answers LayersLoaded.
    """

    forward: int
    base: int
    rows: int
    num_slots: int
    layers_per_step: int
    sequences: list[SequenceSlice]


@message
@dataclass(frozen=True, slots=True)
class LayersLoaded:
    """traffic manager -> prefill engine: the slots of this step are free for use and hold every cached row.

    failed: requests of this forward whose rows did not come, in this step or an earlier one; the others go on.
    """

    forward: int
    step: int
    failed: list[RequestKey]


@message
@dataclass(frozen=True, slots=True)
class LayersComputed:
    """prefill engine -> traffic manager: the new rows of this step's layers are in their slots; send them on."""

    forward: int
    step: int


@message
@dataclass(frozen=True, slots=True)
class ForwardDrained:
    """traffic manager -> prefill engine: all rows of the forward but failed's are delivered; device memory is quiet."""

    forward: int
    failed: list[RequestKey]


@message
@dataclass(frozen=True, slots=True)
class Delivered:
    """prefill TM -> decode TM -> decode engine: the staging buffer holds the whole prompt's KV."""

    request_id: str
    attempt: int


@message
@dataclass(frozen=True, slots=True)
class LoadPages:
    """decode engine -> traffic manager, call: copy staged blocks to device pages, persist the new full ones, free the
    staging buffer. keys: of the prompt's full blocks; pages: one per staged block, or none if the request has ended
    already and is only persisted. Answered by Done when the pages hold the KV and the new blocks are announced to
    storage (their writes go on behind)."""

    request_id: str
    attempt: int
    pages: list[int]
    keys: bytes
    cached_blocks: int


@message
@dataclass(frozen=True, slots=True)
class PersistPages:
    """decode engine -> traffic manager, call: announce the blocks to storage, then write them from device pages.

    Answered by Done at announcement; PagesPersisted follows when the pages may be reused.
    """

    ticket: int
    pages: list[int]
    keys: bytes


@message
@dataclass(frozen=True, slots=True)
class PagesPersisted:
    """traffic manager -> decode engine: the pages of this ticket have been copied out (stored or given up)."""

    ticket: int


@message
@dataclass(frozen=True, slots=True)
class Release:
    """engine -> traffic manager: the request has ended; free what it holds once no peer can touch it."""

    request_id: str
    attempt: int


@message
@dataclass(frozen=True, slots=True)
class StageFailed:
    """traffic manager -> engine: this request cannot go on here."""

    request_id: str
    attempt: int
    code: ErrorCode
    detail: str


@message
@dataclass(frozen=True, slots=True)
class ReadQueue:
    """traffic manager -> engine, on change: hit tokens of requests not yet buffered, and tokens a second that are read
    while there are any (0: not known yet)."""

    tokens: int
    rate: float


@message
@dataclass(frozen=True, slots=True)
class Done:
    """The plain answer to a call."""


# ---- traffic manager <-> traffic manager ---------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class PeerStaged:
    """decode TM -> prefill TM: the decode buffer's slots for this request, and how many tokens it has read, from block
    `first` on.

    control: the sender's control endpoint. allocation_s, read_s: as in Ready, of this side. released: the request has
    ended there meanwhile, and only PeerReleased is waited for: from a side that knows nothing of the request, too.
    """

    request_id: str
    attempt: int
    buffer: RegionDescriptor
    slots: list[int]
    first: int
    cached_tokens: int
    control: str
    allocation_s: float
    read_s: float
    released: bool = False


@message
@dataclass(frozen=True, slots=True)
class PushRows:
    """prefill TM -> decode TM, call: write rows [start, stop) of some layers from the decode buffer into prefill device
    memory, where row 0 of layer first + i lies at byte offset target + i * stride. Answered by Done when they are
    there."""

    request_id: str
    attempt: int
    first: int
    num_layers: int
    start: int
    stop: int
    memory: RegionDescriptor
    target: int
    stride: int


@message
@dataclass(frozen=True, slots=True)
class PeerReleased:
    """prefill TM -> decode TM: I do not write into this attempt's slots any more."""

    request_id: str
    attempt: int
