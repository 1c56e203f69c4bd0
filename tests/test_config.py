"""The configuration: where values come from, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import ModelConfig, dump_config, load_config, read_dumped_config
from common.errors import ConfigError
from common.model import configured_scaling, read_configured_model


def test_flags_go_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[frontend]\nport = 1\n[timeouts]\ncall_s = 1\nread_s = 1\n[decode]\nbuffer = '2MiB'\n")
    monkeypatch.setenv("DUALPATH_FRONTEND__PORT", "2")
    monkeypatch.setenv("DUALPATH_TIMEOUTS__CALL_S", "2")
    config = load_config(file, {"frontend.port": 3, "timeouts.read_s": None})
    assert (config.frontend.port, config.timeouts.call_s, config.timeouts.read_s) == (3, 2.0, 1.0)
    assert config.decode.buffer == 2 << 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\npaht = 'x'", "model.paht: no such field"),
        ("[decoder]\nthreads = 1", "decoder: no such field"),
        ("[decode]\nbuffer = '12 parsecs'", "decode.buffer: '12 parsecs' is not a size"),
        ("[scheduler]\ncontrol = 'localhost:5700'", "scheduler.control: 'localhost:5700' is not an endpoint"),
        ("[network]\nhost = '0.0.0.0'", "network.host '0.0.0.0' is not loopback: set security.curve_dir"),
        ("[scheduler]\ncontrol = 'tcp://[fd00::1]:5700'", "scheduler.control 'fd00::1' is not loopback"),
        ("[prefill]\nquota_s = inf", "prefill.quota_s: Input should be a finite number"),
        ("[perf]\ntime_factor = nan", "perf.time_factor: Input should be a finite number"),
        ("[network]\nsnic_rate = inf", "network.snic_rate: Input should be a finite number"),
        ("[timeouts]\nread_s = inf", "timeouts.read_s: Input should be a finite number"),
        ("[model]\nprofile = 'ds-660b'\n[perf]\npredictor = 'x'", "perf.predictor is for a real model"),
        ("[storage]\ntier = 1\n[scheduler]\nread_side = 'de_only'", "storage.tier keeps what prefill nodes read"),
    ],
)
def test_a_wrong_value_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert message in str(refused.value)


def test_what_a_child_cannot_use_is_named_in_one_line() -> None:
    both = ModelConfig(path="/some/model", profile="ds-660b")
    text = dump_config(load_config().model_copy(update={"model": both}))
    with pytest.raises(ConfigError) as refused:
        read_dumped_config(text)
    assert str(refused.value).startswith("configuration: model.path and model.profile are both set")
    assert "\n" not in str(refused.value)


def test_an_engine_is_not_larger_than_a_node() -> None:
    config = load_config(overrides={"model.profile": "ds-660b", "perf.gpus": 9})
    with pytest.raises(ConfigError, match=r"perf\.gpus 9: a node of h800 has 8"):
        read_configured_model(config)
    assert configured_scaling(load_config(overrides={"model.profile": "ds-660b", "perf.gpus": 8})).gpus == 8
