"""Which constants were fitted to which published numbers. Live experiments and `loadgen simulate` use none of it.

Table 1 fixes FLOPs and bytes beforehand. Fitted are then
- prefill: one factor on the three efficiencies of a ds prefill, whose proportions stay those of the default;
- decode_layer_s: what a layer of a decode step costs beside computing;
- handover_s: from a prompt's last rows to its decoding: what the engines tell one another;
- reserve_bytes: HBM of a prefill GPU that is neither weights nor KV of its batch, which decides what Basic can batch.
  The paper does not state it; it is fitted to the ablation's layerwise step, which thus is no held-out number.

Offline and online do not share one calibration: the published offline job needs a prefill about as fast as the default,
the published TTFT at 0.4 APS a slower one, near its limit. So there are two, each for its kind of load and nothing
else; `loadgen paper table3` shows what each says of the other's.

Not fitted but chosen, by rules that hold for every model and figure: a system without a compute quota takes a fixed
number of new tokens a forward, as many as the quota admits of mean turns at the default efficiencies, so that it has
about the same mean batch (batch_tokens()) and the same budget under every calibration; engines of an expert group wait
for one another as live ones do (GATHER_S).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from common.perf.bounds import Turn
from common.perf.compute import ComputeModel
from common.perf.hardware import Efficiency, Hardware, get_hardware
from common.perf.models import ModelProfile
from common.perf.thresholds import QUOTA_S
from loadgen.simulator import Cluster, Overheads, Scenario
from loadgen.systems import SYSTEMS

DEFAULT = Efficiency()
GATHER_S = 0.01
#: Of HBM, left to weights and KV (common.perf.compute.ComputeModel.kv_tokens() has it too).
USABLE = 0.9


@dataclass(frozen=True, slots=True)
class Calibration:
    """See above. fitted_to: names in loadgen.paper.published."""

    name: str
    prefill: float = 1.0
    decode_layer_s: float = DEFAULT.decode_layer_s
    handover_s: float = 0.0
    reserve_bytes: float = 0.0
    fitted_to: tuple[str, ...] = ()

    @property
    def hardware(self) -> Hardware:
        efficiency = replace(
            DEFAULT,
            linear_experts=DEFAULT.linear_experts * self.prefill,
            prefill_dsa=DEFAULT.prefill_dsa * self.prefill,
            indexer=DEFAULT.indexer * self.prefill,
            decode_layer_s=self.decode_layer_s,
        )
        return replace(get_hardware("h800"), efficiency=efficiency)

    @property
    def overheads(self) -> Overheads:
        return Overheads(gather_s=GATHER_S, handover_s=self.handover_s)

    def model(self, profile: ModelProfile) -> ModelProfile:
        """With the memory that weights and the reserve leave to a prefill batch: experts are spread over half as many
        GPUs as decode has, but at least a node."""
        hardware = self.hardware
        weights = profile.shared_params + profile.expert_params / max(profile.expert_gpus / 2, hardware.gpus)
        return replace(profile, prefill_kv_bytes=USABLE * hardware.hbm_bytes - weights - self.reserve_bytes)

    def describe(self) -> dict[str, Any]:
        """For a result: each constant beside its default."""
        efficiency = self.hardware.efficiency
        fitted = {
            name: {"fitted": getattr(efficiency, name), "default": getattr(DEFAULT, name)}
            for name in ("linear_experts", "prefill_dsa", "indexer", "decode_layer_s")
        }
        return {
            "fitted_to": list(self.fitted_to),
            "constants": {
                **fitted,
                "handover_s": {"fitted": self.handover_s, "default": 0.0},
                "reserve_bytes": {"fitted": self.reserve_bytes, "default": None},
            },
            "rules": {
                "batch_tokens": "what the quota admits of mean turns at the default efficiencies",
                "gather_s": GATHER_S,
            },
        }


def batch_tokens(cluster: Cluster, turn: Turn) -> int:
    """New tokens of mean turns whose attention takes as long as the compute quota at the default efficiencies; at least
    one turn's."""
    compute = ComputeModel(cluster.model, replace(cluster.hardware, efficiency=DEFAULT))
    attention_s = compute.prefill_attention_s(turn.hit, turn.miss)
    return max(turn.miss, int(QUOTA_S / attention_s * turn.miss))


def calibrated(scenario: Scenario, calibration: Calibration) -> Scenario:
    """With the calibration's overheads, and the fixed budget of a system that has no quota."""
    scenario = replace(scenario, overheads=calibration.overheads)
    if SYSTEMS[scenario.system].scheduled:
        return scenario
    return replace(scenario, batch_tokens=batch_tokens(scenario.cluster, scenario.mean_turn))


#: `loadgen paper calibrate` finds these again.
_RESERVE_BYTES = 5.6e9
OFFLINE = Calibration(
    "offline",
    prefill=1.037,
    reserve_bytes=_RESERVE_BYTES,
    fitted_to=("jct_s_2p4d", "jct_layerwise_over_basic"),
)
ONLINE = Calibration(
    "online",
    prefill=0.547,
    decode_layer_s=371e-6,
    handover_s=0.130,
    reserve_bytes=_RESERVE_BYTES,
    fitted_to=("ttft_s_2p4d", "ttst_s_2p4d", "tpot_s_2p4d"),
)
CALIBRATIONS = {calibration.name: calibration for calibration in (OFFLINE, ONLINE)}
