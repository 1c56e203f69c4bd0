"""What an image's entry point makes of its container, its health check, and the commands that prepare its volumes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from common.config import load_config
from common.errors import ConfigError
from common.rpc import read_key_pair
from compose.container import __main__ as entry
from compose.container import addresses, health, shaping
from services.launcher.commands import app

ELSEWHERE = "192.0.2.7"
OWN = {"snic": "127.0.0.2", "cnic": "127.0.0.3"}


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A container with these files and names; returns how to write its configuration."""
    monkeypatch.setattr(entry, "CONFIG", tmp_path / "dualpath.toml")
    monkeypatch.setattr(entry, "SERVED", tmp_path / "served.toml")
    monkeypatch.setattr(entry, "GIVEN", str(tmp_path / "addresses"))
    monkeypatch.setattr(health, "GIVEN", str(tmp_path / "addresses"))
    monkeypatch.setattr(entry, "own_address", OWN.__getitem__)

    def configure(text: str) -> None:
        entry.CONFIG.write_text('[scheduler]\ncontrol = "tcp://scheduler:5700"\n[security]\ncurve_dir = "/k"\n' + text)

    configure("")
    entry.SERVED.write_text('[model]\npath = "/models/m"\nname = "m"\ndigest = "d"\n')
    return configure


def test_own_address_is_the_one_that_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [ELSEWHERE, "127.0.0.1"]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(None, None, None, None, (each, 0)) for each in found])
    assert addresses.own_address("snic") == "127.0.0.1"
    found.remove("127.0.0.1")
    with pytest.raises(ConfigError, match="alias snic"):
        addresses.own_address("snic")


def test_own_address_of_a_name_that_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"no network where it is called no-such\.invalid"):
        addresses.own_address("no-such.invalid")


def test_engine_gets_its_addresses_and_the_model(container: Callable[[str], None]) -> None:
    command, environment = entry.prepare(["prefill", "--name", "p"], {"DUALPATH_MODEL__NAME": "mine"})
    assert command[:2] == ["setpriv", "--no-new-privs"]
    assert command[2:] == ["dualpath", "serve", "prefill", "--config", str(entry.CONFIG), "--name", "p"]
    assert environment == {
        "DUALPATH_NETWORK__HOST": OWN["cnic"],
        "DUALPATH_NETWORK__SNIC": OWN["snic"],
        "DUALPATH_NETWORK__CNIC": OWN["cnic"],
        "DUALPATH_MODEL__PATH": "/models/m",
        "DUALPATH_MODEL__NAME": "mine",
        "DUALPATH_MODEL__DIGEST": "d",
    }


def test_scheduler_binds_its_own_address(container: Callable[[str], None]) -> None:
    _, environment = entry.prepare(["scheduler"], {})
    assert environment["DUALPATH_SCHEDULER__CONTROL"] == f"tcp://{OWN['cnic']}:5700"
    assert "DUALPATH_MODEL__PATH" not in environment


def test_front_end_is_on_the_compute_network_alone(container: Callable[[str], None]) -> None:
    _, environment = entry.prepare(["frontend"], {})
    assert "DUALPATH_NETWORK__SNIC" not in environment


def test_configured_model_is_left_alone(container: Callable[[str], None]) -> None:
    container('[model]\nprofile = "ds-27b"\n')
    _, environment = entry.prepare(["decode"], {})
    assert not [name for name in environment if name.startswith("DUALPATH_MODEL")]
    assert entry.prepare(["model"], {"MODEL": "a/b"})[0] == []


def test_model_that_nobody_has_fetched(container: Callable[[str], None]) -> None:
    entry.SERVED.unlink()
    with pytest.raises(ConfigError, match="`model`"):
        entry.prepare(["decode"], {})


def test_tasks_and_other_commands(container: Callable[[str], None]) -> None:
    assert entry.prepare(["keys"], {})[0] == ["dualpath", "keys", "/k"]
    out = ["--out", str(entry.SERVED)]
    assert entry.prepare(["model"], {"MODEL": ""})[0] == ["dualpath", "fetch", *out]
    assert entry.prepare(["model"], {"MODEL": "a/b"})[0] == ["dualpath", "fetch", "--model", "a/b", *out]
    assert entry.prepare(["dualpath", "top"], {"A": "b"}) == (["dualpath", "top"], {"A": "b"})


def test_rates_shape_the_nics_that_have_the_addresses(
    container: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    shaped: list[tuple[str, str, int]] = []
    monkeypatch.setattr(entry, "device_of", lambda address: f"at-{address}")
    monkeypatch.setattr(entry, "shape_nic", lambda *given: shaped.append(given))
    entry.prepare(["decode"], {"SNIC_RATE": "1gbit", "CNIC_RATE": ""})
    assert shaped == [("at-127.0.0.2", "snic", 125_000_000)]
    with pytest.raises(ConfigError, match="CNIC_RATE 'fast'"):
        entry.prepare(["decode"], {"CNIC_RATE": "fast"})


def test_rate_that_no_packet_queue_holds() -> None:
    with pytest.raises(ConfigError, match="SNIC_RATE is 1000 bytes/s"):
        shaping.shape_nic("eth0", "snic", 1000)


def test_device_of_an_address() -> None:
    assert shaping.device_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=ELSEWHERE):
        shaping.device_of(ELSEWHERE)


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
def test_health_is_what_the_process_says(
    container: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, status: int, expected: int
) -> None:
    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("DUALPATH_HEALTH__PORT", str(server.server_port))
        assert health.main() == expected


def test_health_without_a_process(container: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("DUALPATH_HEALTH__PORT", str(port))
    assert health.main() == 1


def test_a_lost_address_ends_the_process(container: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *given: ended.append(given))
    Path(health.GIVEN).write_text(f"127.0.0.1\n{ELSEWHERE}")
    assert health.main() == 1
    assert ended == [(1, signal.SIGTERM)]


def test_keys_are_made_once(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    assert CliRunner().invoke(app, ["keys", str(directory)]).exit_code == 0
    made = read_key_pair(str(directory))
    assert {file.name: file.stat().st_mode & 0o777 for file in directory.iterdir()} == {
        "cluster.key": 0o600,
        "cluster.key_secret": 0o600,
    }
    assert CliRunner().invoke(app, ["keys", str(directory)]).exit_code == 0
    assert read_key_pair(str(directory)) == made


def test_keys_that_are_none_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "cluster.key_secret").write_text("nonsense")
    assert CliRunner().invoke(app, ["keys", str(tmp_path)]).exit_code == 2
    assert (tmp_path / "cluster.key_secret").read_text() == "nonsense"


def test_fetch_writes_a_configuration_that_names_the_model(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "served.toml"
    assert CliRunner().invoke(app, ["fetch", "--model", str(model), "--out", str(out)]).exit_code == 0
    section = load_config(out).model
    assert (section.path, section.name) == (str(model), model.name)
    assert section.digest
    assert [file.name for file in tmp_path.iterdir()] == [out.name]
