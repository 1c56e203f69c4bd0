"""Nodes of GPUs and NICs, and the one table of how much of their peak is reached."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Every factor between a data sheet and a predicted time; a result prints them. The same for all systems."""

    #: Of the 8-bit peak. Public H800 prefill figures of DeepSeek V3 imply about 300 TFLOP/s a GPU, exchanges of experts
    #: included.
    linear_experts: float = 0.15
    #: Of the 16-bit peak: a model without experts. Assumed.
    linear_dense: float = 0.50
    #: Of the 16-bit peak. Assumed.
    prefill_gqa: float = 0.50
    #: Of the 16-bit peak. Assumed, such that a whole prefill runs at 300 TFLOP/s, as our quick model of the paper's
    #: figures has it; the sparse kernel alone reaches up to 640.
    prefill_mla: float = 0.30
    prefill_dsa: float = 0.30
    #: Of the 8-bit peak; scores and selection. Assumed, for the same 300 TFLOP/s.
    indexer: float = 0.15
    #: Of the 16-bit peak. FlashMLA's figure, 410 TFLOP/s; assumed for grouped queries too.
    decode_attention: float = 0.41
    #: Of the bandwidth of HBM. Assumed.
    hbm: float = 0.80
    #: Seconds a layer of a prefill forward, hidden by no other work. Assumed: half of its exchanges overlap.
    prefill_layer_s: float = 100e-6
    #: Seconds a layer of a decode step, hidden by no other work. Assumed: dispatch takes 131 us (measured idle, 16
    #: GPUs), combine about as long, and some of it overlaps. So a ds-660b step of 64 sequences of 33K tokens a GPU
    #: takes 38 ms; published are 36 to 39 ms.
    decode_layer_s: float = 150e-6


@dataclass(frozen=True, slots=True)
class Hardware:
    """One node. FLOP/s are dense peaks of one GPU; rates are bytes a second, one direction."""

    name: str
    flops_16bit: float
    flops_8bit: float
    hbm_rate: float
    hbm_bytes: float
    gpus: int = 8
    cnic_rate: float = 50e9  # of each GPU's own NIC
    snic_rate: float = 50e9  # of the node's storage NIC
    dram_rate: float = 500e9
    efficiency: Efficiency = Efficiency()

    def describe(self) -> dict[str, object]:
        """For a result's JSON."""
        return asdict(self)


_H800 = Hardware("h800", flops_16bit=989e12, flops_8bit=1979e12, hbm_rate=3.35e12, hbm_bytes=80e9)

#: The two differ in NVLink, which is not modelled.
HARDWARE = {node.name: node for node in (_H800, replace(_H800, name="h100"))}


def get_hardware(name: str) -> Hardware:
    """ConfigError if no node has this name."""
    try:
        return HARDWARE[name]
    except KeyError:
        raise ConfigError(f"perf.hardware {name!r} is unknown: one of {', '.join(HARDWARE)}") from None
