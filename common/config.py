"""One typed configuration: a TOML file, overridden by environment variables, overridden by flags.

DUALPATH_SECTION__FIELD=value sets one field (DUALPATH_TIMEOUTS__LOOKUP_S=0.5). Sizes: bytes or "256MiB".
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from common.config_layers import Layers, problems, read_layers
from common.errors import ConfigError
from common.faults import Fault

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(value: object) -> object:
    """'256MiB' -> 268435456; numbers pass."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size: write a number of bytes or, say, 256MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def endpoint_host(endpoint: str) -> str:
    """'tcp://[::1]:5700' -> '::1'. ValueError unless it is a tcp endpoint."""
    match = re.fullmatch(r"tcp://(?:\[([^\]]+)\]|([^:\[\]]+)):(\d+|\*)", endpoint)
    if match is None:
        raise ValueError(f"{endpoint!r} is not an endpoint of the form tcp://HOST:PORT")
    return match[1] or match[2]


def _endpoint(value: str) -> str:
    endpoint_host(value)
    return value


def _path_mtu(value: int) -> int:
    if value not in (0, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"{value} is no path MTU: 256, 512, 1024, 2048 or 4096 bytes, or 0 for the port's")
    return value


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
SizeOrNone = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(ge=0)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """What is served. path: a directory, or a hub id that transformers can fetch; or else profile: a model of
    common.perf, whose compute is only timed."""

    path: str = ""
    profile: str = ""
    name: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    block_size: Count = 64
    digest: str | None = None
    max_context_tokens: int | None = Field(default=None, gt=0)


class RdmaConfig(_Section):
    """RDMA devices behind snic and cnic. gid_index: in the port's table; default: the RoCE v2 GID of the address. mtu:
    path MTU in bytes, the same on both sides; 0: the port's. spin: poll on after each completion, which is faster and
    takes a core. loopback: copies between host and device memory go through the NIC as well (paper §5)."""

    gid_index: Annotated[int, Field(ge=0)] | None = None
    mtu: Annotated[int, AfterValidator(_path_mtu)] = 0
    spin: bool = False
    loopback: bool = False


class QosConfig(_Section):
    """How much a network keeps for whom where its traffic classes meet (paper §5); `dualpath qos` prints its settings.

    high_share: of a contended link, for everything but KV; the rest keeps KV from starving. InfiniBand's arbiter has
    weights in units of 64 bytes instead, low_weight for KV's virtual lane and high_weight for each other, and
    high_limit: after so many times 4 KiB of the others one packet of any lane may go (255, at which KV would never
    get through beside them, is not allowed).
    """

    high_share: Annotated[float, Field(ge=0.5, lt=1)] = 0.999
    high_limit: int = Field(default=240, ge=0, le=254)
    high_weight: int = Field(default=192, ge=1, le=255)
    low_weight: int = Field(default=64, ge=1, le=255)


class NetworkConfig(_Section):
    """Addresses. host binds control sockets; snic and cnic are the storage and the compute interface's addresses (with
    RDMA also a device, NAME or NAME:PORT).

    snic_rate, cnic_rate: bytes a second, each way, to which this node's interfaces are paced in user space; 0: they are
    not. tcp_streams: TCP connections to one peer and class at most, for links that one does not fill.
    """

    host: str = "127.0.0.1"
    snic: str = "127.0.0.1"
    cnic: str = "127.0.0.1"
    snic_rate: Rate = 0.0
    cnic_rate: Rate = 0.0
    tcp_streams: Annotated[int, Field(gt=0, le=16)] = 1
    transport: Literal["auto", "verbs", "shm", "tcp", "null"] = "auto"
    rdma: RdmaConfig = RdmaConfig()
    qos: QosConfig = QosConfig()
    node: str = ""


class SecurityConfig(_Section):
    """CURVE keys of the cluster: a directory with cluster.key_secret (zmq.auth certificates). Empty: loopback only."""

    curve_dir: str = ""


class StorageConfig(_Section):
    """The block store behind the gateway. tier: bytes of DRAM in which a prefill node keeps blocks that it has read (0:
    none)."""

    path: str = ""
    staging: Size = 64 << 20
    verify: bool = True
    concurrency: Count = 8
    tier: SizeOrNone = 0


class SchedulerConfig(_Section):
    """control: where the scheduler listens and everybody finds it.

    alpha: a node whose read queue is longer, in tokens, is a second choice; beta: cap on an engine's unfinished tokens
    (spec §7; `dualpath profile` measures both). record: a file to which every event and decision is written, so that
    they can be replayed; empty: none.
    """

    control: Endpoint = "tcp://127.0.0.1:5700"
    read_side: Literal["pe_only", "de_only", "round_robin", "shorter_queue", "split"] = "shorter_queue"
    alpha: Count = 1 << 20
    beta: Count = 1 << 20
    max_waiting: Count = 4096
    record: str = ""


class EngineConfig(_Section):
    """One engine and its traffic manager. device_memory is KV memory ("HBM"), buffer the staging DRAM.

    group: engines of this role that are scheduled together; default: those of the node.
    """

    group: str = ""
    device_memory: Size = 512 << 20
    buffer: Size = 512 << 20
    threads: int = Field(default=0, ge=0)


class PrefillConfig(EngineConfig):
    """layerwise: at most resident_layers layers of a forward batch are in device memory at once, in two halves: while
    one is computed the other is sent on and loaded. Otherwise all layers of a request are, from before its read until
    it is delivered.

    quota_s: predicted attention time of one forward, all layers summed (spec §8; needs perf.predictor or a profiled
    model); 0: max_batch_tokens alone bounds it.
    """

    layerwise: bool = True
    quota_s: Annotated[float, Field(ge=0)] = 0.0
    device_memory: Size = 256 << 20
    resident_layers: Annotated[int, Field(ge=2)] = 6
    max_batch_tokens: Count = 512
    max_batch_requests: Count = 16


class DecodeConfig(EngineConfig):
    max_running: Count = 16


class PerfConfig(_Section):
    """Predicted compute (common.perf), and how a cluster of a profiled model is scaled.

    hardware: of which node; gpus: how many of its GPUs one engine stands for; time_factor: every predicted time takes
    so many times as long here. KV moves as moved_layers layers of row_bytes a token, whatever it is in the real model.
    predictor: a file by `dualpath profile` for a real model.
    """

    hardware: str = "h800"
    gpus: Count = 1
    time_factor: Annotated[float, Field(gt=0)] = 1.0
    moved_layers: Count = 8
    row_bytes: Count = 32
    predictor: str = ""


class FrontendConfig(_Section):
    """max_pending: requests in hand at once; max_queued_tokens: prompt tokens that wait for their first token at once
    (0: any number); what is over is refused. api_keys: a TOML file of tenants and their keys; empty: no key is needed.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_attempts: Count = 3
    max_pending: Count = 1024
    max_queued_tokens: int = Field(default=0, ge=0)
    api_keys: str = ""


class TimeoutsConfig(_Section):
    """Every wait has one of these deadlines, in seconds.

    register_s: for a scheduler to be there, at the start and after the last one has gone. engines_s: a request for an
    engine of each role to be there.
    """

    call_s: Seconds = 5.0
    start_s: Seconds = 300.0
    register_s: Seconds = 120.0
    engines_s: Seconds = 15.0
    heartbeat_s: Seconds = 0.5
    heartbeat_timeout_s: Seconds = 5.0
    lookup_s: Seconds = 1.0
    breaker_s: Seconds = 2.0
    read_s: Seconds = 20.0
    store_s: Seconds = 20.0
    transfer_s: Seconds = 20.0
    stage_s: Seconds = 60.0
    request_s: Seconds = 600.0
    drain_s: Seconds = 20.0


class HealthConfig(_Section):
    """The HTTP endpoint of every process for /live, /ready, /health and /metrics, without access control: beyond
    loopback only by this choice. port 0: any free one, which the log and `dualpath status` show; else an engine's
    traffic manager takes the next one."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65534)

    @property
    def of_traffic_manager(self) -> HealthConfig:
        """That of the traffic manager of the engine whose this is."""
        return self.model_copy(update={"port": self.port and self.port + 1})


class TraceConfig(_Section):
    """Traces of requests (common.tracing). dir: a directory for the spans of every process, for `dualpath trace`; or
    otlp: URL of an OpenTelemetry collector. Neither: no traces. sample: share of the requests."""

    dir: str = ""
    otlp: str = ""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0


class LogConfig(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"


class Config(_Section):
    """Everything a process needs to know. The same file serves every role."""

    model: ModelConfig = ModelConfig()
    network: NetworkConfig = NetworkConfig()
    security: SecurityConfig = SecurityConfig()
    storage: StorageConfig = StorageConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    perf: PerfConfig = PerfConfig()
    frontend: FrontendConfig = FrontendConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    health: HealthConfig = HealthConfig()
    trace: TraceConfig = TraceConfig()
    log: LogConfig = LogConfig()
    faults: list[Fault] = []

    @model_validator(mode="after")
    def _batch_holds_a_block(self) -> Config:
        if self.prefill.max_batch_tokens < self.model.block_size:
            raise ValueError(
                f"prefill.max_batch_tokens {self.prefill.max_batch_tokens} is less than a block of "
                f"{self.model.block_size} tokens, at whose borders prompts are cut"
            )
        return self

    @model_validator(mode="after")
    def _one_kind_of_model(self) -> Config:
        if self.model.path and self.model.profile:
            raise ValueError("model.path and model.profile are both set: serve a model, or the profile of one")
        if self.network.transport == "null" and not self.model.profile:
            raise ValueError("network.transport null moves no KV and a real model needs it: set model.profile instead")
        return self

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Config:
        if self.perf.predictor and self.model.profile:
            raise ValueError("perf.predictor is for a real model; what model.profile computes is predicted without it")
        if self.trace.dir and self.trace.otlp:
            raise ValueError("trace.dir and trace.otlp are both set: traces go to one of them")
        if self.storage.tier and self.scheduler.read_side == "de_only":
            raise ValueError("storage.tier keeps what prefill nodes read, which is nothing with read_side de_only")
        return self

    @model_validator(mode="after")
    def _loopback_or_keys(self) -> Config:
        hosts = {
            "network.host": self.network.host,
            "network.snic": self.network.snic,
            "network.cnic": self.network.cnic,
            "scheduler.control": endpoint_host(self.scheduler.control),
        }
        for name, host in hosts.items():
            if not is_loopback(host) and not self.security.curve_dir:
                raise ValueError(
                    f"{name} {host!r} is not loopback: set security.curve_dir to a directory with CURVE keys"
                )
        return self


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses of both families."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_config(file: Path | None = None, overrides: dict[str, Any] | None = None) -> Config:
    """Read the file, then the environment, then overrides (dotted names). ConfigError names the first wrong field, and
    who set it."""
    layers = read_layers(file, overrides or {})
    try:
        return Config.model_validate(layers.values)
    except ValidationError as error:
        raise ConfigError(str(problems(error, layers, Config)[0])) from None


def dump_config(config: Config) -> str:
    """The configuration as JSON that read_dumped_config() takes back; how a launcher hands it to its children."""
    return config.model_dump_json()


def read_dumped_config(text: str) -> Config:
    """ConfigError if it is none."""
    try:
        return Config.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(str(problems(error, Layers(), Config)[0])) from None
