"""Figure 3: what hardware gives (I/O and memory against computing) and what a batch needs (requests a forward)."""

from __future__ import annotations

from dataclasses import dataclass

from common.perf.compute import ComputeModel
from common.perf.hardware import get_hardware
from common.perf.models import MODELS, ModelProfile
from loadgen.paper.exhibit import Exhibit, Line, Panel, Row

#: The paper's: each request has 30K tokens of context and appends 300.
CONTEXT, APPEND = 30_000, 300
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Generation:
    """Data sheets: FLOP/s are dense and of the narrowest format that the tensor cores have; the compute NIC is that of
    a DGX of this generation, bytes a second."""

    name: str
    flops: float
    hbm_bytes: float
    nic_rate: float

    @property
    def io_to_compute(self) -> float:
        """Bytes of NIC a FLOP."""
        return self.nic_rate / self.flops


GENERATIONS = (
    Generation("Ampere A100 (BF16, 200 Gb/s)", 312e12, 80e9, 25e9),
    Generation("Hopper H100 (FP8, 400 Gb/s)", 1979e12, 80e9, 50e9),
    Generation("Blackwell B200 (FP4, 400 Gb/s)", 9000e12, 192e9, 50e9),
)


def figure3() -> Exhibit:
    ampere, _, blackwell = GENERATIONS
    fall = ampere.io_to_compute / blackwell.io_to_compute
    names = [generation.name for generation in GENERATIONS]
    trend = [
        Line("NIC to compute", names, [g.io_to_compute / ampere.io_to_compute for g in GENERATIONS]),
        Line(
            "HBM to compute",
            names,
            [g.hbm_bytes / g.flops / (ampere.hbm_bytes / ampere.flops) for g in GENERATIONS],
        ),
    ]
    gains, rows = [], []
    for model in MODELS.values():
        rates = [_tokens_per_s(model, requests) for requests in BATCHES]
        gains.append(Line(model.name, BATCHES, [rate / rates[0] for rate in rates]))
        rows.append(
            Row(
                f"throughput_{model.name}_batch_{BATCHES[-1]}_over_1",
                f"{model.name}: tokens a second in batches of {BATCHES[-1]} over those of 1",
                "x",
                rates[-1] / rates[0],
            )
        )
    title = f"requests with {CONTEXT:,} tokens of context, {APPEND} new"
    return Exhibit(
        "fig3",
        "Hardware trend, and throughput against batch size",
        [Row("io_to_compute_ampere_over_blackwell", "NIC bandwidth a FLOP, Ampere over Blackwell", "x", fall), *rows],
        (
            Panel("against Ampere", "", "ratio, Ampere = 1", trend),
            Panel(title, "requests in a batch of one GPU", "relative token throughput", gains),
        ),
        notes=(
            "left: NVIDIA's data sheets, dense FLOP/s of each generation's narrowest format: our reading of what gives"
            " the published ratio",
            "right: predicted by common/perf/compute.py with its default efficiencies; the paper's points are an image",
        ),
    )


def _tokens_per_s(model: ModelProfile, requests: int) -> float:
    """New tokens of one GPU's prefill forward."""
    compute = ComputeModel(model, get_hardware("h800"))
    return requests * APPEND / compute.prefill_s([(CONTEXT, APPEND)] * requests).total_s
