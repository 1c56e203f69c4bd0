"""The table of systems: what spec §9 says of each, as configurations that are valid."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from common.perf.hardware import get_hardware
from common.perf.models import MODELS, get_model_profile
from common.perf.scaling import Scaling
from common.rundir import RunDirectory
from loadgen.experiments.lab import Lab
from loadgen.experiments.placement import LocalPlacement
from loadgen.systems import BOUND_AS, CHAIN, SYSTEMS, UNBOUNDED, base_settings, system_settings

HIT, MISS = 32_400, 284


def scaling(model: str = "ds-660b") -> Scaling:
    return Scaling(get_model_profile(model), get_hardware("h800"), gpus=1, time_factor=4.0)


def config(system: str, model: str = "ds-660b", node: str = "p0") -> Config:
    scaled = scaling(model)
    return Lab(scaled, 2, 4, HIT, MISS, LocalPlacement(scaled), RunDirectory()).config(system, node, Path("/blocks"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_is_a_valid_configuration(system: str, model: str) -> None:
    assert config(system, model).model.profile == model


def test_basic_is_the_specifications() -> None:
    basic = config("basic")
    assert basic.scheduler.read_side == "pe_only"
    assert not basic.prefill.layerwise
    assert basic.prefill.quota_s == 0
    assert basic.scheduler.alpha == UNBOUNDED  # PE = least tok_e under beta, whatever the read queues
    assert basic.scheduler.beta == config("dualpath").scheduler.beta


def test_each_step_of_the_ablation_adds_one_thing() -> None:
    def changes(before: str, after: str) -> dict[str, Any]:
        old, new = asdict(SYSTEMS[before]), asdict(SYSTEMS[after])
        return {name: new[name] for name in new if new[name] != old[name]}

    steps = [changes(before, after) for before, after in pairwise(CHAIN)]
    assert steps == [
        {"layerwise": True},
        {"read_side": "round_robin"},
        {"read_side": "shorter_queue", "scheduled": True},
    ]


def test_oracle_differs_from_dualpath_in_what_is_free() -> None:
    oracle = system_settings("oracle", scaling(), HIT, MISS)
    assert oracle.pop("network.transport") == "null"
    assert oracle == system_settings("dualpath", scaling(), HIT, MISS)


def test_few_layers_at_a_time_are_of_as_many_tokens_as_in_the_real_engine() -> None:
    """ds-660b: 4 GB hold two layers of two forwards of 4e9 / (4 * 656) tokens; here a layer's row has 32 bytes."""
    memory = system_settings("dualpath", scaling(), HIT, MISS)["prefill.device_memory"]
    assert memory / (4 * 32) == pytest.approx(4e9 / (4 * 656), rel=1e-4)
    basic = config("basic").prefill.device_memory
    assert basic / (8 * 32) == pytest.approx(4e9 / (61 * 656), rel=1e-4)


def test_a_tier_is_the_engines_share_of_the_nodes_dram() -> None:
    # 1.5 TB a node, an eighth for one GPU, 40,016 real bytes a token, 256 moved ones
    assert config("tiered").storage.tier == int(1.5e12 / 8 * 256 / 40_016)
    assert config("basic").storage.tier == 0


def test_nics_and_thresholds_by_hand() -> None:
    p0, store = config("dualpath"), config("dualpath", node="store")
    assert p0.network.snic_rate == pytest.approx(50e9 / 8 * 256 / 40_016 / 4)
    assert p0.network.cnic_rate == pytest.approx(50e9 * 256 / 40_016 / 4)
    assert store.network.snic_rate == 0
    assert p0.scheduler.alpha == int(3 * 50e9 / 8 / 40_016)
    assert p0.prefill.quota_s == 0.3


def test_experts_over_several_nodes_make_one_group_of_all_prefill_engines() -> None:
    assert {config("dualpath", node=node).prefill.group for node in ("p0", "p1", "p2", "p3")} == {"prefill"}
    assert config("dualpath", "ds-27b").prefill.group == ""  # a group a node


def test_no_system_touches_the_cluster_itself() -> None:
    own = {"scheduler.read_side", "scheduler.alpha", "prefill.layerwise", "prefill.device_memory", "prefill.quota_s",
           "storage.tier", "network.transport"}
    for system in SYSTEMS:
        settings = system_settings(system, scaling(), HIT, MISS)
        assert settings.keys() <= own
        assert not settings.keys() & base_settings(scaling(), HIT, MISS).keys()


def test_which_formula_bounds_which_system() -> None:
    assert {name for name, kind in BOUND_AS.items() if kind == "basic"} == {"basic", "basic+layerwise", "tiered"}
    assert BOUND_AS["oracle"] == "oracle"
