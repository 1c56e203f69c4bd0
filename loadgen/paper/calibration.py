"""Which constants were fitted to which published numbers. Live experiments and `loadgen simulate` use none of it.

Free are the efficiency of a prefill (one factor on its three parts, so that their proportions stay those of the
default) and what a layer of a decode step costs beside computing. Table 1 fixes FLOPs and bytes beforehand. Offline and
online do not share one calibration: the published offline job needs a cluster that prefills faster than one with the
published online latencies at 0.4 APS. So there are two, each used for its kind of load and nothing else, and the other
one's prediction is shown beside (`loadgen paper table3`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from common.perf.hardware import Efficiency, Hardware, get_hardware

DEFAULT = Efficiency()


@dataclass(frozen=True, slots=True)
class Calibration:
    """prefill: factor on linear_experts, prefill_dsa and indexer of the default. decode_layer_s: see Efficiency.
    fitted_to: names in loadgen.paper.published."""

    name: str
    prefill: float = 1.0
    decode_layer_s: float = DEFAULT.decode_layer_s
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

    def describe(self) -> dict[str, Any]:
        """For a result: each fitted constant beside its default."""
        efficiency = self.hardware.efficiency
        return {
            "fitted_to": list(self.fitted_to),
            "constants": {
                name: {"fitted": getattr(efficiency, name), "default": getattr(DEFAULT, name)}
                for name in ("linear_experts", "prefill_dsa", "indexer", "decode_layer_s")
            },
        }


OFFLINE = Calibration("offline", fitted_to=("jct_s_2p4d",))
ONLINE = Calibration("online", fitted_to=("ttft_s_2p4d", "tpot_s_2p4d"))
CALIBRATIONS = {calibration.name: calibration for calibration in (OFFLINE, ONLINE)}
