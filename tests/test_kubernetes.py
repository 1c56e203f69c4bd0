"""The manifests for Kubernetes: committed as generated, good by its schemas, of this code's roles and ports."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from common.cluster import CLOSE_S
from common.config import load_config
from common.pages import LIVE, METRICS, READY
from common.types import Role
from compose.kubernetes.__main__ import CONFIG, HEALTH_PORT, HERE, RULES, files
from compose.kubernetes.roles import UID

BASE = HERE / "base"
OVERLAYS = [BASE, HERE / "overlays" / "two-networks", HERE / "overlays" / "monitoring"]
#: Kinds that Kubernetes has no schema of: of Multus and of Prometheus's operator.
FOREIGN = ("k8s.cni.cncf.io/", "monitoring.coreos.com/", "kustomize.config.k8s.io/")
ROLES = [role for role in Role if role is not Role.TRAFFIC_MANAGER]
Manifest = dict[str, Any]


@cache
def manifests_of(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def resources_of(kustomization: Path) -> Iterator[tuple[Path, Manifest]]:
    """Everything that a kustomization makes, before its patches: files of its resources, and those of bases."""
    for name in manifests_of(kustomization / "kustomization.yaml")[0].get("resources", []):
        path = (kustomization / name).resolve()
        if path.is_dir():
            yield from resources_of(path)
        else:
            yield from ((path, manifest) for manifest in manifests_of(path))


def base() -> dict[tuple[str, str], Manifest]:
    return {(each["kind"], each["metadata"]["name"]): each for _, each in resources_of(BASE)}


def workload(role: Role) -> Manifest:
    [found] = [
        each for (kind, name), each in base().items() if name == role.value and kind in ("Deployment", "StatefulSet")
    ]
    return found


def pod(role: Role) -> Manifest:
    return dict(workload(role)["spec"]["template"]["spec"])


def container(role: Role) -> Manifest:
    [found] = pod(role)["containers"]
    return dict(found)


def test_what_is_generated_is_committed() -> None:
    assert {path: path.read_text() for path in files()} == files(), "run python -m compose.kubernetes"


def test_every_file_is_used() -> None:
    used = {path for overlay in OVERLAYS for path, _ in resources_of(overlay)}
    for overlay in OVERLAYS:
        patches = manifests_of(overlay / "kustomization.yaml")[0].get("patches", [])
        used |= {overlay / patch["path"] for patch in patches} | {overlay / "kustomization.yaml"}
    assert set(HERE.rglob("*.yaml")) == {path for path in used if HERE in path.parents}


def check_schema(manifest: Manifest) -> None:
    if not manifest["apiVersion"].startswith(FOREIGN):
        kubernetes_validate.validate(manifest, "1.30", strict=True)


def test_schemas() -> None:
    every = base()
    assert {"Namespace", "PersistentVolumeClaim", "NetworkPolicy", "Service", "Deployment", "StatefulSet"} == {
        kind for kind, _ in every
    }
    for manifest in every.values():
        check_schema(manifest)


def test_a_schema_is_strict() -> None:
    manifest = deepcopy(workload(Role.PREFILL))
    manifest["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schema(manifest)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_kustomize_builds_it(overlay: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    done = subprocess.run(["kubectl", "kustomize", str(overlay)], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    built = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert {(each["kind"], each["metadata"]["name"]) for _, each in resources_of(overlay)} <= {
        (each["kind"], each["metadata"]["name"]) for each in built
    }
    assert {each["metadata"].get("namespace") for each in built if each["kind"] != "Namespace"} == {"dualpath"}
    maps = {each["metadata"]["name"]: each["data"] for each in built if each["kind"] == "ConfigMap"}
    [config] = [name for name in maps if name.startswith("dualpath-config-")]
    assert maps[config] == {CONFIG.name: CONFIG.read_text()}
    pods = [each["spec"]["template"]["spec"] for each in built if each["kind"] in ("Deployment", "StatefulSet")]
    mounted = {volume["configMap"]["name"] for each in pods for volume in each["volumes"] if "configMap" in volume}
    assert mounted == {config} and len(pods) == len(ROLES)
    if overlay.name == "two-networks":
        _check_nics(built)
    if overlay.name == "monitoring":
        assert set(maps["dualpath-dashboards"]) == {path.name for path in (HERE.parent / "grafana").rglob("*.json")}


def _check_nics(built: list[Manifest]) -> None:
    attached = set()
    for manifest in built:
        template = manifest.get("spec", {}).get("template", {})
        networks = template.get("metadata", {}).get("annotations", {}).get("k8s.v1.cni.cncf.io/networks")
        if networks:
            attached.add(manifest["metadata"]["name"])
            assert networks == "storage@snic,compute@cnic"
            check_schema(manifest)
            [served] = template["spec"]["containers"]
            assert f"serve {manifest['metadata']['name']} " in served["command"][-1]
    assert attached == {"prefill", "decode", "storage-gateway"}
    assert {each["metadata"]["name"] for each in built if each["kind"] == "NetworkAttachmentDefinition"} == {
        "storage",
        "compute",
    }


def test_the_script_of_two_networks_takes_the_interfaces_addresses(tmp_path: Path) -> None:
    [patch] = manifests_of(HERE / "overlays" / "two-networks" / "prefill.yaml")
    script = patch["spec"]["template"]["spec"]["containers"][0]["command"][-1].replace("$$", "$")
    fakes = {
        "ip": 'echo "3: $6    inet 10.9.0.$([ $6 = snic ] && echo 1 || echo 2)/16 brd 10.9.255.255 scope global $6"',
        "dualpath": 'echo "$* $DUALPATH_NETWORK__SNIC $DUALPATH_NETWORK__CNIC"',
    }
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["sh", "-ec", script], env=path, text=True, capture_output=True, check=True)
    assert done.stdout == "serve prefill --config /etc/dualpath/dualpath.toml 10.9.0.1 10.9.0.2\n"
    (tmp_path / "ip").write_text("#!/bin/sh\n")
    done = subprocess.run(["sh", "-ec", script], env=path, text=True, capture_output=True, check=False)
    assert done.returncode and "snic has no IPv4 address" in done.stderr and not done.stdout


def test_every_role_has_a_workload() -> None:
    kinds = {role: workload(role)["kind"] for role in ROLES}
    assert [role for role, kind in kinds.items() if kind == "StatefulSet"] == [Role.PREFILL, Role.DECODE]
    scheduler = workload(Role.SCHEDULER)["spec"]
    assert scheduler["replicas"] == 1 and scheduler["strategy"] == {"type": "Recreate"}
    for role in ROLES:
        assert container(role)["command"][2:5] == ["dualpath", "serve", role.value]


def test_selectors_and_services_find_their_pods() -> None:
    for role in ROLES:
        spec = workload(role)["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    services = {name: each for (kind, name), each in base().items() if kind == "Service"}
    for role in (Role.SCHEDULER, Role.FRONTEND, Role.PREFILL, Role.DECODE):
        service = services[role.value]["spec"]
        assert service["selector"] == workload(role)["spec"]["selector"]["matchLabels"]
        ports = {port["name"]: port["containerPort"] for port in container(role)["ports"]}
        assert service["ports"] and all(ports[port["targetPort"]] == port["port"] for port in service["ports"])
        assert workload(role)["spec"].get("serviceName", role.value) == role.value
    config = load_config(CONFIG)
    assert config.scheduler.control == f"tcp://scheduler:{services['scheduler']['spec']['ports'][0]['port']}"
    assert services["frontend"]["spec"]["ports"][0]["port"] == config.frontend.port


def test_probes_are_the_codes_own_pages() -> None:
    config = load_config(CONFIG, {"health.port": HEALTH_PORT})
    for role in ROLES:
        served = container(role)
        paths = {name: served[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
        assert paths == {"startup": LIVE, "liveness": LIVE, "readiness": READY}
        assert all(served[f"{name}Probe"]["httpGet"]["port"] == "health" for name in paths)
        ports = {port["name"]: port["containerPort"] for port in served["ports"]}
        assert ports["health"] == HEALTH_PORT
        assert ports.get("tm-health", config.health.of_traffic_manager.port) == config.health.of_traffic_manager.port
        assert ("tm-health" in ports) == (role in (Role.PREFILL, Role.DECODE))
    stated = re.search(r"DUALPATH_HEALTH__PORT=(\d+)", (HERE.parent / "Dockerfile").read_text())
    assert stated is not None and int(stated[1]) == HEALTH_PORT


def test_a_pod_is_given_the_time_that_its_drain_takes() -> None:
    drain_s = load_config(CONFIG).timeouts.drain_s
    for role in ROLES:
        grace = pod(role)["terminationGracePeriodSeconds"]
        assert grace >= drain_s + CLOSE_S
        if role in (Role.PREFILL, Role.DECODE):
            assert grace >= 2 * drain_s + CLOSE_S


def test_pods_have_no_rights_that_they_do_not_need() -> None:
    for role in ROLES:
        spec, served = pod(role), container(role)["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == UID
        assert not spec["automountServiceAccountToken"] and not spec["enableServiceLinks"]
        assert served["readOnlyRootFilesystem"] and not served["allowPrivilegeEscalation"]
        assert served["capabilities"] == {"drop": ["ALL"]}
    assert f"--uid {UID}" in (HERE.parent / "Dockerfile").read_text()


def test_volumes_are_there_and_mounted_where_the_configuration_says() -> None:
    config, every = load_config(CONFIG), base()
    for role in ROLES:
        volumes = {volume["name"]: volume for volume in pod(role)["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(role)["volumeMounts"]}
        assert volumes.keys() == mounts.keys()
        assert mounts["curve"] == config.security.curve_dir
        if role is Role.STORAGE_GATEWAY:
            assert mounts["blocks"] == config.storage.path
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert every["PersistentVolumeClaim", claim["claimName"]]["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("role", ROLES)
def test_a_pods_environment_is_a_configuration(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes would set it, for a pod at 10.1.2.3."""
    for variable in container(role)["env"]:
        value = variable.get("value", "10.1.2.3").replace("$(POD_IP)", "10.1.2.3")
        monkeypatch.setenv(variable["name"], value)
    [kustomization] = manifests_of(BASE / "kustomization.yaml")
    if "envFrom" in container(role):
        [literals] = [each["literals"] for each in kustomization["configMapGenerator"] if "literals" in each]
        for literal in literals:
            monkeypatch.setenv(*literal.split("=", 1))
    config = load_config(BASE / CONFIG.name)
    assert config.network.host == config.health.host == "10.1.2.3" and config.health.port == HEALTH_PORT
    at = "10.1.2.3" if role is Role.SCHEDULER else "scheduler"
    assert config.scheduler.control == f"tcp://{at}:5700", "a process binds an address, and looks for a name"
    moves_kv = role in (Role.PREFILL, Role.DECODE, Role.STORAGE_GATEWAY)
    nic = "10.1.2.3" if moves_kv else "127.0.0.1"
    assert config.network.snic == config.network.cnic == nic
    assert bool(config.model.path) == (role is not Role.SCHEDULER)


def test_monitoring_finds_every_process() -> None:
    [monitor] = manifests_of(HERE / "overlays" / "monitoring" / "pod-monitor.yaml")
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    for role in ROLES:
        assert selected <= workload(role)["spec"]["template"]["metadata"]["labels"].items()
    endpoints = {endpoint["port"]: endpoint for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    names = {port["name"] for role in ROLES for port in container(role)["ports"]}
    assert endpoints.keys() == {"health", "tm-health"} <= names
    assert all(endpoint["path"] == METRICS and endpoint["honorLabels"] for endpoint in endpoints.values())
    assert endpoints["tm-health"]["relabelings"] == [{"replacement": "traffic-manager", "targetLabel": "role"}]
    [rules] = manifests_of(HERE / "overlays" / "monitoring" / "prometheus-rule.yaml")
    assert rules["spec"]["groups"] == yaml.safe_load(RULES.read_text())["groups"]
