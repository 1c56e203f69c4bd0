"""Dashboards, rules and what Prometheus scrapes are of this cluster: its roles, its ports, metrics that it exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry

from common.config import HealthConfig
from common.types import Role
from common.watchdog import LIMIT_S, CallbackTimes
from compose.grafana.__main__ import files
from tests.dashboards_support import (
    COMPOSE,
    DASHBOARDS,
    PROMETHEUS,
    Asked,
    dashboard,
    panel_queries,
    panels,
    rule_queries,
    rules,
    scrape_jobs,
    scraped_roles,
)
from tests.lifecycle_harness import client_of, live_cluster

ENGINES = [Role.PREFILL, Role.DECODE]
ASKED = [*panel_queries(), *rule_queries("record"), *rule_queries("alert")]
#: Suffixes of a histogram's series.
SERIES = ("_bucket", "_sum", "_count")
#: Labels that Prometheus gives to what it scrapes, and that of a bucket.
TARGET = {"job", "instance", "role", "le"}


def test_dashboards_are_what_the_code_says() -> None:
    assert {path: path.read_text() for path in DASHBOARDS} == files(), "run python -m compose.grafana"


def _unknown(value: object, known: object, place: str = "") -> Iterator[str]:
    """Where known lacks something of value."""
    if isinstance(value, dict) and isinstance(known, dict):
        for key, inner in value.items():
            yield from _unknown(inner, known[key], f"{place}.{key}") if key in known else [f"{place}.{key}"]
    elif isinstance(value, list) and isinstance(known, list) and len(value) == len(known):
        for index, pair in enumerate(zip(value, known, strict=True)):
            yield from _unknown(*pair, f"{place}[{index}]")
    elif value != known:
        yield place


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_grafana_knows_every_field(path: Path) -> None:
    """By its own types: what they do not know is lost when they read it."""
    register_default_plugins()
    read = json.dumps(Dashboard.from_json(dashboard(path)), cls=JSONEncoder)
    assert [*_unknown(dashboard(path), json.loads(read))] == []
    wrong = dashboard(path)
    wrong["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    read = json.dumps(Dashboard.from_json(wrong), cls=JSONEncoder)
    assert [*_unknown(wrong, json.loads(read))] == [".panels[1].fieldConfig.defaults.units"]


def test_dashboards_are_told_apart() -> None:
    found = [dashboard(path) for path in DASHBOARDS]
    assert len({each["uid"] for each in found}) == len({each["title"] for each in found}) == len(found) == 2
    assert [each["uid"] for each in found] == [path.stem for path in DASHBOARDS]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_are_whole_and_do_not_overlap(path: Path) -> None:
    every = dashboard(path)["panels"]
    ids, titles = [panel["id"] for panel in every], [panel["title"] for panel in every]
    assert len(set(ids)) == len(ids) and len(set(titles)) == len(titles)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert cells and not cells & taken and all(0 <= x < 24 for x, _ in cells), panel["title"]
        taken |= cells
    for panel in panels(path):
        assert panel["description"].strip() and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and letters == sorted(set(letters))


def test_a_legend_tells_the_curves_of_a_panel_apart() -> None:
    for path in DASHBOARDS:
        for panel in panels(path):
            legends = [target["legendFormat"] for target in panel["targets"]]
            assert len(set(legends)) == len(legends), panel["title"]
            for target in panel["targets"]:
                grouped = re.match(r"sum by \(([^)]*)\)", target["expr"])
                shown = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
                if grouped is not None:
                    assert shown == grouped[1].split(", "), panel["title"]


def test_every_process_is_scraped() -> None:
    jobs = scrape_jobs()
    assert scraped_roles(jobs["dualpath"]) == [role.value for role in Role if role is not Role.TRAFFIC_MANAGER]
    assert scraped_roles(jobs["dualpath-traffic-managers"]) == [role.value for role in ENGINES]
    [of_manager] = jobs["dualpath-traffic-managers"]["relabel_configs"]
    assert of_manager == {"target_label": "role", "replacement": Role.TRAFFIC_MANAGER.value}


def test_where_the_image_has_its_metrics() -> None:
    ports = {name: job["dns_sd_configs"][0]["port"] for name, job in scrape_jobs().items()}
    stated = re.search(r"DUALPATH_HEALTH__PORT=(\d+)", (COMPOSE / "Dockerfile").read_text())
    assert stated is not None
    health = HealthConfig(port=int(stated[1]))
    assert ports == {"dualpath": health.port, "dualpath-traffic-managers": health.of_traffic_manager.port}


def test_services_have_the_names_of_roles() -> None:
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    assert {name for job in scrape_jobs().values() for name in scraped_roles(job)} <= services.keys()
    [url] = [
        source["url"]
        for source in yaml.safe_load((COMPOSE / "grafana/provisioning/datasources/prometheus.yaml").read_text())[
            "datasources"
        ]
    ]
    assert url == "http://prometheus:9090" and "prometheus" in services
    mounts = [volume.split(":")[:2] for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    where = {inside: COMPOSE / outside for outside, inside in mounts if outside.startswith("./")}
    assert where["/etc/prometheus"] == PROMETHEUS and (PROMETHEUS / "prometheus.yml").is_file()
    [provider] = yaml.safe_load((COMPOSE / "grafana/provisioning/dashboards/dualpath.yaml").read_text())["providers"]
    assert where[provider["options"]["path"]] == DASHBOARDS[0].parent


def test_callbacks_are_watched_for_the_limit_that_the_log_has() -> None:
    [held] = [rule for rule in rules("alert") if rule["alert"] == "DualPathEventLoopHeld"]
    assert f'le="{LIMIT_S}"' in held["expr"] and f"over {LIMIT_S * 1e3:g} ms" in held["annotations"]["summary"]


def test_alerts_say_what_to_do() -> None:
    names = [rule["alert"] for rule in rules("alert")]
    assert len(set(names)) == len(names)
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"]


def _labels(registry: CollectorRegistry) -> dict[str, set[str]]:
    """By every name that a query may use: the labels of that metric, whether it has values yet or not."""
    shown = {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}
    return shown | {
        name: set(getattr(collector, "_labelnames", ()))
        for collector, names in registry._collector_to_names.items()
        for name in names
    }


async def test_every_metric_and_label_that_is_asked_for_is_exported(tmp_path: Path) -> None:
    exported = {f"{family.name}{suffix}": {"le"} for family in CallbackTimes().collect() for suffix in SERIES}
    async with live_cluster(tmp_path / "blocks") as live, client_of(live) as client:
        await client.ask([7] * 130, 2, stream=True)  # some metrics are there from the first engine or request on
        for service in live.services:
            exported |= _labels(service.metrics.registry)
    for rule in rules("record"):
        exported[rule["record"]] = {*rule.get("labels", ()), *Asked("", rule["expr"]).grouped}
    assert len(exported.keys() & set().union(*(asked.names for asked in ASKED))) > 50
    unknown = {asked.place: missing for asked in ASKED if (missing := asked.names - exported.keys())}
    assert unknown == {}
    for asked in ASKED:
        known = set().union(*(exported[name] for name in asked.names))
        assert asked.labels <= known | TARGET, asked
