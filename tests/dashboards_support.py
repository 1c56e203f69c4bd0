"""What dashboards and rules ask of Prometheus, and a Prometheus that asks the processes of a live cluster."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

COMPOSE = Path(__file__).parent.parent / "compose"
DASHBOARDS = sorted((COMPOSE / "grafana" / "dashboards").glob("*.json"))
PROMETHEUS = COMPOSE / "prometheus"
#: Metrics of ours, and what every process exports.
NAMES = re.compile(r"\b(?:dualpath[_:][a-z0-9_:]+|process_[a-z_]+)\b")
SELECTORS = re.compile(rf"{NAMES.pattern}(?:\{{[^}}]*\}})?")
SCRAPE_S = 1
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Asked:
    """An expression, and where it stands."""

    place: str
    expr: str

    @property
    def names(self) -> set[str]:
        return set(NAMES.findall(self.expr))

    @property
    def grouped(self) -> set[str]:
        """Labels that remain, or are matched or joined on."""
        lists = re.findall(r"\b(?:by|on|ignoring|group_left) \(([^)]*)\)", self.expr)
        return {label for each in lists for label in each.split(", ")}

    @property
    def labels(self) -> set[str]:
        """Every label that it looks at."""
        return self.grouped | set(re.findall(r"[{,]\s*(\w+)\s*[=!]", self.expr))

    @property
    def selectors(self) -> set[str]:
        return set(SELECTORS.findall(self.expr))


def dashboard(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def panels(path: Path) -> list[dict[str, Any]]:
    """Those that show something."""
    return [panel for panel in dashboard(path)["panels"] if panel["type"] != "row"]


def panel_queries() -> list[Asked]:
    return [
        Asked(f"{path.stem}: {panel['title']} {target['refId']}", target["expr"])
        for path in DASHBOARDS
        for panel in panels(path)
        for target in panel["targets"]
    ]


def rules(kind: str) -> list[dict[str, Any]]:
    """kind: record or alert."""
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def rule_queries(kind: str) -> list[Asked]:
    return [Asked(rule[kind], rule["expr"]) for rule in rules(kind)]


def scrape_jobs() -> dict[str, dict[str, Any]]:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    return {job["job_name"]: job for job in config["scrape_configs"]}


def scraped_roles(job: Mapping[str, Any]) -> list[str]:
    [found] = job["dns_sd_configs"]
    return list(found["names"])


class Prometheus:
    """Asked over HTTP. at: of what time, in seconds since the epoch; until it is set, of now."""

    def __init__(self, url: str) -> None:
        self.at: float | None = None
        self._http = httpx.Client(base_url=url, timeout=10)

    def get(self, path: str, **parameters: str) -> Any:
        response = self._http.get(f"/api/v1/{path}", params=parameters)
        assert response.status_code == 200, f"{parameters}: {response.text}"
        return response.json()["data"]

    def ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def numbers(self, expr: str) -> list[float]:
        """Its values, without those that are none."""
        at = {} if self.at is None else {"time": str(self.at)}
        values = [float(sample["value"][1]) for sample in self.get("query", query=expr, **at)["result"]]
        return [value for value in values if not math.isnan(value)]


@contextmanager
def prometheus(directory: Path, targets: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[Prometheus]:
    """The project's own configuration, but for where processes are: targets[job][role], HOST:PORT each. In a compose
    cluster DNS tells; what is made of its answers is the same."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{SCRAPE_S}s")
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [
            {"targets": list(addresses), "labels": {"__meta_dns_name": role}}
            for role, addresses in targets[job["job_name"]].items()
        ]
    shutil.copy(PROMETHEUS / "rules.yml", directory)
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (directory / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        asked = Prometheus(f"http://127.0.0.1:{port}")
        until = time.monotonic() + START_S
        while not asked.ready():
            assert process.poll() is None and time.monotonic() < until, (directory / "prometheus.log").read_text()
            time.sleep(0.1)
        yield asked
    finally:
        process.terminate()
        process.wait(30)
