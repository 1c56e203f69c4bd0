"""The configuration: where values come from, and what is said of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from common.config import ModelConfig, dump_config, load_config, read_dumped_config
from common.config_layers import locate
from common.errors import ConfigError
from common.model import configured_scaling, read_configured_model
from services.launcher import configuration
from services.launcher.commands import app


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


BAD = """\
# a comment
[model]
profile = "ds-27b"
digest = '''
of several
lines'''
[decode]
buffer = '12 parsecs'

[frontend]
prot = 8000
[[faults]]
point = "message"
action = "explode"
"""


def test_every_problem_is_explained_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(BAD)
    monkeypatch.setenv("DUALPATH_TIMEOUTS__READ_S", "soon")
    config, _, problems = configuration.check(file)
    assert config is None
    said = [str(problem) for problem in problems]
    assert said[0].startswith("decode.buffer: '12 parsecs' is not a size") and said[0].endswith(f"({file}, line 8)")
    assert said[1] == f"frontend.prot: no such field; did you mean frontend.port? ({file}, line 11)"
    assert said[2].startswith("timeouts.read_s: ")
    assert said[2].endswith("(environment variable DUALPATH_TIMEOUTS__READ_S)")
    assert said[3].startswith("faults.0.action: ") and said[3].endswith(f"({file}, line 14)")
    assert len(said) == 4


def test_fields_that_do_not_go_together_are_both_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "both.toml"
    file.write_text("[model]\nprofile = 'ds-660b'\n")
    monkeypatch.setenv("DUALPATH_MODEL__PATH", "/some/model")
    _, _, [problem] = configuration.check(file)
    assert problem.place == f"environment variable DUALPATH_MODEL__PATH; {file}, line 2"


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("[model]\nprofile = 'ds-1'", "model.profile", "ds-1"),
        ("[security]\ncurve_dir = '/no/such'", "security.curve_dir", "cannot read /no/such"),
    ],
)
def test_values_that_only_fail_in_use_are_found(text: str, field: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    config, _, [problem] = configuration.check(file)
    assert config is None and problem.field == field and words in problem.what
    assert problem.place == f"{file}, line 2"


def test_what_is_shown_says_the_same_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, again = tmp_path / "cluster.toml", tmp_path / "again.toml"
    file.write_text(
        "[model]\nprofile = 'ds-27b'\n[frontend]\nport = 1\n[decode]\nbuffer = '2MiB'\n"
        "[[faults]]\npoint = 'message'\naction = 'drop'\ntype = 'a \"b\"'\n"
    )
    monkeypatch.setenv("DUALPATH_FRONTEND__PORT", "2")
    config, layers, _ = configuration.check(file)
    assert config is not None
    lines = configuration.effective(config, layers)
    origins = {line.partition(" = ")[0]: line.rpartition("# ")[2] for line in lines}
    assert origins["port"] == "default"  # of health, the last section with one
    assert any(line.startswith("port = 2 ") and line.endswith("DUALPATH_FRONTEND__PORT") for line in lines)
    assert any(line.startswith("buffer = 2097152 ") and line.endswith("cluster.toml, line 6") for line in lines)
    assert origins["faults"] == f"{file}, line 8" and origins["call_s"] == "default"
    monkeypatch.delenv("DUALPATH_FRONTEND__PORT")
    again.write_text("\n".join(lines))
    assert load_config(again) == config


def test_a_value_is_no_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[frontend]\nport = 1\n")
    monkeypatch.setenv("DUALPATH_FRONTEND__PORT__X", "1")
    with pytest.raises(ConfigError, match=r"frontend\.port\.x: port is a value, not a section \(environment variable"):
        load_config(file)


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=2), st.integers() | st.text("x\n#=[]'\"", max_size=5), max_size=6
    )
)
def test_values_are_located_where_they_are_written(values: dict[str, int | str]) -> None:
    """One value a line, between comments and blank lines: a value is found in the line that it was put in."""
    lines, expected = ["# c = 1"], {}
    for key, value in values.items():
        lines += ["", f"{key} = {json.dumps(value)} # d = 2"]
        expected[(key,)] = len(lines)
    assert locate("\n".join(lines) + "\n") == expected


def test_a_multi_line_value_is_located_where_it_begins() -> None:
    assert locate("a = [\n  1,\n  2,\n]\nb.c = 1\n[d]\ne = 1\n") == {
        ("a", "0"): 1, ("a", "1"): 1, ("b", "c"): 5, ("d", "e"): 7,
    }  # fmt: skip


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.toml").write_text(BAD)
    (tmp_path / "good.toml").write_text("[model]\nprofile = 'ds-27b'\n")
    bad = CliRunner().invoke(app, ["config", "--check", "--config", str(tmp_path / "bad.toml")])
    assert bad.exit_code == 2
    good = CliRunner().invoke(app, ["config", "--check", "--config", str(tmp_path / "good.toml")])
    assert good.exit_code == 0 and "is good" in good.stdout
    shown = CliRunner().invoke(app, ["config", "--config", str(tmp_path / "good.toml")])
    assert shown.exit_code == 0 and "[timeouts]" in shown.stdout


def test_a_variable_that_nobody_reads_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALPATH_FRONTEND_PORT", "1")
    monkeypatch.setenv("DUALPATH_SOMETHING_ELSE", "1")
    config, _, [problem] = configuration.check(None)
    assert config is None
    assert str(problem) == "DUALPATH_FRONTEND_PORT: is not read: write DUALPATH_FRONTEND__PORT (environment)"


def test_a_flag_sets_one_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALPATH_SCHEDULER__ALPHA", "1")
    shown = CliRunner().invoke(app, ["config", "--set", "scheduler.alpha=7", "--set", "model.profile=ds-27b"])
    assert shown.exit_code == 0
    [line] = [line for line in shown.stdout.splitlines() if line.startswith("alpha = ")]
    assert line.startswith("alpha = 7 ") and line.endswith("# command line")
    for wrong in ("alpha=7", "scheduler.alpha", "scheduler..alpha=1", "scheduler.alpha=x"):
        assert CliRunner().invoke(app, ["config", "--check", "--set", wrong]).exit_code == 2
