"""Every control message, grouped by channel and direction.

Who talks to whom:
    any process        <-> scheduler         registration, heartbeats, membership
    front end          <-> scheduler         requests in, failures out
    engines            <-> scheduler         fetch work, assignments, progress
    engines             -> front end         tokens
    prefill engine      -> decode engine     the first token
    engine             <-> its traffic manager   staging, layers, handoff, persistence
    traffic manager    <-> traffic manager   staging slots, layer pushes, releases
    traffic manager, scheduler -> storage gateway   match, read, store
Byte strings named *keys hold concatenated block keys; tokens are packed (common.types).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ErrorCode
from common.model import Manifest
from common.transport.region import RegionDescriptor
from common.types import FinishReason, ReadPath, Request, RequestKey, Role
from common.wire import message

# ---- membership: any process <-> scheduler -------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold. Tokens of context, blocks of staging buffer, tokens of device memory."""

    max_context_tokens: int
    buffer_blocks: int
    device_tokens: int


@message
@dataclass(frozen=True, slots=True)
class Member:
    """One live process. incarnation is new at every start; control is its ROUTER endpoint.

    node: the machine whose NICs it shares, as configured; host: common.transport.memory.host_identity().

    traffic_manager (engines only): the control endpoint of the engine's traffic manager.
    """

    role: Role
    name: str
    incarnation: str
    control: str
    node: str
    pid: int
    host: str = ""
    manifest: Manifest | None = None
    capacity: Capacity | None = None
    traffic_manager: str = ""
    traffic_manager_incarnation: str = ""


@message
@dataclass(frozen=True, slots=True)
class Register:
    """process -> scheduler, call. Answered by Registered, or an error that names what differs."""

    protocol: int
    member: Member


@message
@dataclass(frozen=True, slots=True)
class Registered:
    heartbeat_s: float
    members: list[Member]


@message
@dataclass(frozen=True, slots=True)
class Heartbeat:
    """process -> scheduler, every heartbeat_s, with all its counters and gauges."""

    incarnation: str
    counters: dict[str, float]


@message
@dataclass(frozen=True, slots=True)
class Leave:
    """process -> scheduler: takes no new work from now on (it drains), or is gone (final)."""

    incarnation: str
    final: bool


@message
@dataclass(frozen=True, slots=True)
class MemberJoined:
    """scheduler -> every process."""

    member: Member


@message
@dataclass(frozen=True, slots=True)
class MemberLeft:
    """scheduler -> every process: whatever this incarnation held or was still writing is void."""

    incarnation: str
    name: str
    reason: str


@message
@dataclass(frozen=True, slots=True)
class GetStatus:
    """operator -> scheduler, call. Answered by Status."""


@message
@dataclass(frozen=True, slots=True)
class MemberStatus:
    member: Member
    counters: dict[str, float]


@message
@dataclass(frozen=True, slots=True)
class Status:
    members: list[MemberStatus]
    waiting: int
    running: int


# ---- front end <-> scheduler ---------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class Submit:
    """front end -> scheduler, call: answered by Accepted, or an error (overloaded, no engines, bad request)."""

    request: Request


@message
@dataclass(frozen=True, slots=True)
class Accepted:
    pass


@message
@dataclass(frozen=True, slots=True)
class Cancel:
    """front end -> scheduler; scheduler -> engines: stop this attempt and release all it holds."""

    request_id: str
    attempt: int


@message
@dataclass(frozen=True, slots=True)
class RequestFailed:
    """engine -> scheduler -> front end: this attempt has ended badly; nothing more of it will come."""

    request_id: str
    attempt: int
    code: ErrorCode
    detail: str


# ---- engines <-> scheduler -----------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class Fetch:
    """engine -> scheduler: ready for work, with its load (spec §7). Holds until the next Fetch.

    seq: requests assigned and unfinished. tok: their total tokens. read_q: hit tokens of this node's requests not yet
    buffered. free_device_tokens: device memory not taken (decode engines).
    """

    incarnation: str
    seq: int
    tok: int
    read_q: int
    free_device_tokens: int


@message
@dataclass(frozen=True, slots=True)
class Assign:
    """scheduler -> both engines of a request: where it runs and which side reads its first hit_blocks blocks."""

    request: Request
    prefill: Member
    decode: Member
    read_path: ReadPath
    hit_blocks: int


@message
@dataclass(frozen=True, slots=True)
class RequestDone:
    """decode engine -> scheduler: finished; everything has been released."""

    request_id: str
    attempt: int


@message
@dataclass(frozen=True, slots=True)
class PrefillDone:
    """prefill engine -> scheduler: its part is done and it holds nothing of the request any more."""

    request_id: str
    attempt: int


@message
@dataclass(frozen=True, slots=True)
class HandedOver:
    """decode engine -> scheduler: the KV is in device memory and the staging buffer is free."""

    request_id: str
    attempt: int


# ---- engines -> front end ------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. index counts from the request's first output token, over all attempts."""

    request_id: str
    attempt: int
    index: int
    token: int


@message
@dataclass(frozen=True, slots=True)
class Tokens:
    """engine -> front end: the tokens of one step."""

    tokens: list[Token]


@message
@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """prefill engine -> front end: what was found and what is computed, in tokens."""

    request_id: str
    attempt: int
    cached_tokens: int
    computed_tokens: int


@message
@dataclass(frozen=True, slots=True)
class Finished:
    """decode engine -> front end, after the last token and once the request's blocks are announced to storage."""

    request_id: str
    attempt: int
    reason: FinishReason
    num_tokens: int


# ---- prefill engine -> decode engine -------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that the prefill engine sampled; finish is set if it already ends the request."""

    request_id: str
    attempt: int
    token: int
    cached_tokens: int
    finish: FinishReason | None


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
    """engine -> traffic manager: reserve staging buffer for a request and, where read is set, read the hit blocks.

    keys: of the blocks to read, from the prompt's start. blocks: slots to reserve (decode side: the whole prompt).
    peer / peer_incarnation: control endpoint and incarnation of the other side's traffic manager.
    """

    request_id: str
    attempt: int
    blocks: int
    read: bool
    keys: bytes
    peer: str
    peer_incarnation: str


@message
@dataclass(frozen=True, slots=True)
class Ready:
    """prefill traffic manager -> prefill engine: both sides are staged; cached_tokens of KV are there."""

    request_id: str
    attempt: int
    cached_tokens: int


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

    Layer l lives in slot l % num_slots; slot s starts at byte s * rows * row_bytes of device memory. The traffic
    manager loads cached rows of layers in order, each as soon as its slot is free, and answers LayerLoaded.
    """

    forward: int
    rows: int
    num_slots: int
    sequences: list[SequenceSlice]


@message
@dataclass(frozen=True, slots=True)
class LayerLoaded:
    """traffic manager -> prefill engine: the slot of this layer is free for use and holds every cached row.

    failed: requests of this forward whose rows did not come, in this layer or an earlier one; the others go on.
    """

    forward: int
    layer: int
    failed: list[RequestKey]


@message
@dataclass(frozen=True, slots=True)
class LayerComputed:
    """prefill engine -> traffic manager: the new rows of this layer are in its slot; send them on."""

    forward: int
    layer: int


@message
@dataclass(frozen=True, slots=True)
class ForwardDrained:
    """traffic manager -> prefill engine: all rows of this forward but failed's are delivered; device memory is quiet."""

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
    """traffic manager -> engine, on change: hit tokens of requests not yet buffered."""

    tokens: int


@message
@dataclass(frozen=True, slots=True)
class Done:
    """The plain answer to a call."""


# ---- traffic manager <-> traffic manager ---------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class PeerStaged:
    """decode TM -> prefill TM: the decode buffer's slots for this request, and how many tokens it has read.

    control: the sender's control endpoint.
    """

    request_id: str
    attempt: int
    buffer: RegionDescriptor
    slots: list[int]
    cached_tokens: int
    control: str


@message
@dataclass(frozen=True, slots=True)
class PushRows:
    """prefill TM -> decode TM, call: write rows [0, rows) of a layer from the decode buffer into prefill device memory
    at byte offset target. Answered by Done when they are there."""

    request_id: str
    attempt: int
    layer: int
    rows: int
    memory: RegionDescriptor
    target: int


@message
@dataclass(frozen=True, slots=True)
class PeerReleased:
    """prefill TM -> decode TM: I do not write into this attempt's slots any more."""

    request_id: str
    attempt: int


# ---- storage gateway -----------------------------------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class Match:
    """scheduler -> gateway, call: length of the longest stored prefix of keys, in blocks. Waits for a block in flight,
    but answers within timeouts.lookup_s. Answered by Matched."""

    keys: bytes


@message
@dataclass(frozen=True, slots=True)
class Matched:
    blocks: int


@message
@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """traffic manager -> gateway, call: write each Full Block to its offset (bytes) in the target region.

    Answered by BlockResults within timeouts.read_s: True where the block is in place. Blocks after a miss may be left
    out. Once the answer is there, nothing writes to the target for this call any more.
    """

    request_id: str
    keys: bytes
    target: RegionDescriptor
    offsets: list[int]


@message
@dataclass(frozen=True, slots=True)
class Announce:
    """traffic manager -> gateway, call: these blocks are about to be stored. incarnation: the caller's own, by which
    its leaving is known. Answered by Announced within timeouts.call_s.

    Lookups wait for a wanted block until its Commit, but no longer than timeouts.store_s from here or its Reserve.
    """

    incarnation: str
    keys: bytes


@message
@dataclass(frozen=True, slots=True)
class Announced:
    """wanted[i]: the i-th block is neither stored nor on its way from another writer: send it."""

    wanted: list[bool]


@message
@dataclass(frozen=True, slots=True)
class Reserve:
    """traffic manager -> gateway, call: places in the gateway's buffer for announced blocks, in order of arrival.

    Answered by Reserved within timeouts.store_s. Each place is given back by Commit, ok or not, and by nothing else as
    long as the caller lives.
    """

    incarnation: str
    keys: bytes


@message
@dataclass(frozen=True, slots=True)
class Reserved:
    """offsets (bytes) in target of the first len(offsets) blocks of the call: all of them, or as many as the gateway's
    buffer can ever hold at a time; then Commit these and reserve again for the rest."""

    target: RegionDescriptor
    offsets: list[int]


@message
@dataclass(frozen=True, slots=True)
class Commit:
    """traffic manager -> gateway, call: the reserved blocks have been written; publish them. checksums[i] is the
    source's xxh3-64; what arrived otherwise is refused. An announced block that will not come, or whose place the
    caller will not write to any more, has ok False. Answered by BlockResults within timeouts.store_s."""

    incarnation: str
    keys: bytes
    ok: list[bool]
    checksums: list[int]


@message
@dataclass(frozen=True, slots=True)
class BlockResults:
    """Per block, aligned with the call's keys: True is done, False is a miss or a failed store."""

    ok: list[bool]
