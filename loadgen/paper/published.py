"""What the paper reports, once, by name: the arXiv text and, where that differs, the SIGCOMM version (§ marks are its).

Point values of Figures 3 and 7 to 15 are images; only what the text says of them is here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

from common.workload.table2 import TABLE2


class Role(StrEnum):
    """fitted: a constant, model or workload was made to give it. held out: nothing was; it is compared afterwards.
    formula: follows from the paper's own formula, so it tests ours. none: not published."""

    FITTED = "fitted"
    HELD_OUT = "held out"
    FORMULA = "formula"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Published:
    """form: "" for a value, else how the text gives it: "up to" and "from" are the ends of a range over a figure."""

    value: float
    role: Role
    source: str
    form: str = ""


def _fitted(value: float, source: str, form: str = "") -> Published:
    return Published(value, Role.FITTED, source, form)


def _held_out(value: float, source: str, form: str = "") -> Published:
    return Published(value, Role.HELD_OUT, source, form)


PUBLISHED = {
    # Cache-to-compute ratio, GB of KV a PFLOP, append 429, context 16K and 64K.
    "cache_to_compute_qwen-32b_16k": _fitted(117, "Table 1"),
    "cache_to_compute_qwen-32b_64k": _fitted(267, "Table 1"),
    "cache_to_compute_gpt-oss-120b_16k": _fitted(47, "Table 1"),
    "cache_to_compute_gpt-oss-120b_64k": _fitted(95, "Table 1"),
    "cache_to_compute_qwen3-235b-a22b_16k": _fitted(39, "Table 1"),
    "cache_to_compute_qwen3-235b-a22b_64k": _fitted(60, "Table 1"),
    "cache_to_compute_ds-v3.2_16k": _fitted(13, "Table 1"),
    "cache_to_compute_ds-v3.2_32.7k": _fitted(22, "§3", "about"),
    "cache_to_compute_ds-v3.2_64k": _fitted(36, "Table 1"),
    "cache_to_compute_ds-v3_16k": _fitted(4.8, "Table 1"),
    "cache_to_compute_ds-v3_64k": _fitted(5.8, "Table 1"),
    # Hardware.
    "io_to_compute_ampere_over_blackwell": Published(14.4, Role.FORMULA, "Figure 3"),
    # Offline.
    "speedup_660b_max": _held_out(1.87, "§7.3, Figure 7", "up to"),
    "speedup_27b_max": _held_out(1.78, "§7.3, Figure 7", "up to"),
    "dualpath_over_oracle_27b_min": _held_out(1.09, "§7.3, Figure 7", "from"),
    "dualpath_over_oracle_27b_max": _held_out(1.85, "§7.3, Figure 7", "up to"),
    "speedup_27b_pd_mean": _held_out(1.64, "§7.3, Figure 8", "mean"),
    "speedup_27b_pd_max": _held_out(2.46, "§7.3, Figure 8", "up to"),
    "jct_27b_basic_1p1d_over_basic_1p2d": _held_out(1.0, "§7.3, Figure 8", "about"),
    "jct_27b_dualpath_1p1d_over_basic_2p1d": _held_out(1.0, "§7.3, Figure 8", "about"),
    "jct_27b_dualpath_2p1d_over_dualpath_1p2d": _held_out(1.0, "§7.3, Figure 8", "about"),
    "speedup_append_min": _held_out(1.82, "§7.3, Figure 9", "from"),
    "speedup_append_max": _held_out(1.99, "§7.3, Figure 9", "up to"),
    "jct_layerwise_over_basic": _fitted(1 - 0.1721, "§7.5, Figure 12"),
    "jct_dual_over_basic": _held_out(1 - 0.3819, "§7.5, Figure 12"),
    "jct_dualpath_over_basic": _held_out(1 - 0.4562, "§7.5, Figure 12"),
    # Balance.
    "snic_max_over_avg_round_robin": _held_out(1.53, "§7.5, Figure 13"),
    "snic_max_over_avg": _held_out(1.18, "§7.5, Figure 13"),
    "attention_max_over_avg": _held_out(1.06, "§7.5, Figure 14", "as low as"),
    # Online.
    "aps_dualpath_over_basic_660b": _held_out(2.25, "§7.4, Figure 10"),
    "aps_dualpath_over_basic_27b": _held_out(1.67, "§7.4, Figure 10"),
    # Scale.
    "jct_s_2p4d": _fitted(3167, "Table 3"),
    "jct_s_48p96d": _held_out(3201, "Table 3"),
    "jct_48p96d_over_2p4d": _held_out(3201 / 3167, "Table 3"),
    "ttft_s_2p4d": _fitted(1.739, "Table 3"),
    "ttst_s_2p4d": _fitted(0.228, "Table 3"),
    "tpot_s_2p4d": _fitted(0.039, "Table 3"),
    "ttft_s_44p88d": _held_out(1.847, "Table 3"),
    "ttst_s_44p88d": _held_out(0.194, "Table 3"),
    "tpot_s_44p88d": _held_out(0.036, "Table 3"),
    "aps_44p88d_over_2p4d": _held_out(22.0, "§7.6, Table 3"),
    # Working set, GB.
    "working_set_gb_at_0.1_aps": _held_out(69, "§8.2", "about"),
    "working_set_gb_at_0.45_aps": _held_out(681, "§8.2", "about"),
    # Trajectory sets.
    **{
        f"table2_{name}_{column}": _fitted(value, "Table 2")
        for name, columns in TABLE2.items()
        for column, value in asdict(columns).items()
    },
}
