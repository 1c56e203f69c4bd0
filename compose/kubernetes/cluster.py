"""Everything of the base and its overlays that is generated: which file holds which manifests."""

from __future__ import annotations

from typing import Any

from common.config import Config
from common.pages import METRICS
from common.types import Role
from compose.kubernetes.roles import NAME, NIC_OWNERS, Manifest, labels, serve, workload

NICS = ("snic", "cnic")
ROLES = [role for role in Role if role is not Role.TRAFFIC_MANAGER]
#: By what Prometheus's operator knows a role.
COMPONENT = "__meta_kubernetes_pod_label_app_kubernetes_io_component"
SCRAPE = "10s"
ALL = {"app.kubernetes.io/name": NAME}


def base(config: Config) -> dict[str, list[Manifest]]:
    """By file."""
    files = {f"{role.value}.yaml": workload(role, config) for role in ROLES}
    return {"storage.yaml": _claims(), "network-policy.yaml": _policies(config), **files}


def _claims() -> list[Manifest]:
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": f"{NAME}-{name}", "labels": ALL},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}},
        }
        for name, size in (("blocks", "1Ti"), ("models", "200Gi"))
    ]


def _policies(config: Config) -> list[Manifest]:
    """Data sockets are not encrypted, and health pages ask for no key: only this cluster's pods reach the former."""

    def policy(name: str, selected: dict[str, str], source: list[Manifest], ports: list[int]) -> Manifest:
        rule: Manifest = {"from": source} if source else {}
        if ports:
            rule["ports"] = [{"protocol": "TCP", "port": port} for port in ports]
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": name, "labels": ALL},
            "spec": {"podSelector": {"matchLabels": selected}, "policyTypes": ["Ingress"], "ingress": [rule]},
        }

    metrics = [config.health.port, config.health.of_traffic_manager.port]
    return [
        policy("cluster", ALL, [{"podSelector": {"matchLabels": ALL}}], []),
        policy("clients", labels(Role.FRONTEND), [], [config.frontend.port]),
        policy("metrics", ALL, [{"namespaceSelector": {}}], metrics),
    ]


def two_networks(config: Config) -> dict[str, list[Manifest]]:
    """Patches: a pod that moves KV has the interfaces snic and cnic, by Multus, and uses their addresses. The control
    plane stays on the pod network."""
    patches = {}
    for role in NIC_OWNERS:
        manifest, *_ = workload(role, config)
        template = {
            "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "storage@snic,compute@cnic"}},
            "spec": {"containers": [{"name": role.value, "command": ["tini", "--", "sh", "-ec", _with_nics(role)]}]},
        }
        kind = {key: manifest[key] for key in ("apiVersion", "kind")}
        patches[f"{role.value}.yaml"] = [{**kind, "metadata": {"name": role.value}, "spec": {"template": template}}]
    return patches


def _with_nics(role: Role) -> str:
    """A script; $$ is Kubernetes' way to write a $ in front of a parenthesis."""
    lines = [
        """address() { ip -4 -o address show dev "$1" | awk '{ sub("/.*", "", $4); print $4; exit }'; }""",
        *(f'export DUALPATH_NETWORK__{nic.upper()}="$$(address {nic})"' for nic in NICS),
        *(f': "${{DUALPATH_NETWORK__{nic.upper()}:?{nic} has no IPv4 address}}"' for nic in NICS),
        f"exec {' '.join(serve(role))}",
    ]
    return "\n".join(lines) + "\n"


def monitoring(groups: list[dict[str, Any]]) -> dict[str, list[Manifest]]:
    """For clusters with Prometheus's operator. groups: of compose/prometheus/rules.yml."""

    def endpoint(port: str, relabeling: Manifest) -> Manifest:
        shared = {"path": METRICS, "interval": SCRAPE, "honorLabels": True}
        return {"port": port, **shared, "relabelings": [relabeling | {"targetLabel": "role"}]}

    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": NAME, "labels": ALL},
        "spec": {
            "selector": {"matchLabels": ALL},
            "podMetricsEndpoints": [
                endpoint("health", {"sourceLabels": [COMPONENT]}),
                endpoint("tm-health", {"replacement": Role.TRAFFIC_MANAGER.value}),
            ],
        },
    }
    rules = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": NAME, "labels": ALL},
        "spec": {"groups": groups},
    }
    return {"pod-monitor.yaml": [monitor], "prometheus-rule.yaml": [rules]}
