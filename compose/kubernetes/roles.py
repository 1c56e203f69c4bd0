"""Manifests of the roles, as plain values: what a process with this configuration needs of Kubernetes.

A pod has one network here: control plane and KV share the pod's address (overlays/two-networks gives it two more).
Segments of KV memory are the processes' own (memfd): they count as the pod's memory and need no /dev/shm.
"""

from __future__ import annotations

from math import ceil
from pathlib import PurePosixPath
from typing import Any

from common.cluster import CLOSE_S, ENVIRONMENT
from common.config import Config, EngineConfig
from common.pages import LIVE, READY
from common.types import Role

Manifest = dict[str, Any]

NAME = "dualpath"
IMAGE = "dualpath"
#: User and group of the image, and where it expects what it is given.
UID = 10001
CONFIG_FILE = "/etc/dualpath/dualpath.toml"
MODELS = "/models"
#: Seconds that Services go on sending to a front end that has been told to end.
LAST_CONNECTIONS_S = 5
#: A pod's memory beside KV memory, buffers and staging: Python, a small model's weights.
PROCESS_BYTES = 2 << 30
MIB = 1 << 20
REPLICAS = {Role.SCHEDULER: 1, Role.STORAGE_GATEWAY: 2, Role.PREFILL: 1, Role.DECODE: 2, Role.FRONTEND: 2}
#: Cores that are asked for; a limit would only stall event loops.
CPUS = {Role.SCHEDULER: "1", Role.STORAGE_GATEWAY: "1", Role.PREFILL: "2", Role.DECODE: "2", Role.FRONTEND: "1"}
ENGINES = (Role.PREFILL, Role.DECODE)
#: Roles that read the model: all but the scheduler.
MODEL_READERS = (Role.STORAGE_GATEWAY, *ENGINES, Role.FRONTEND)
#: Roles that move KV.
NIC_OWNERS = (Role.STORAGE_GATEWAY, *ENGINES)


def labels(role: Role) -> dict[str, str]:
    return {"app.kubernetes.io/name": NAME, "app.kubernetes.io/component": role.value}


def workload(role: Role, config: Config) -> list[Manifest]:
    """The role's workload, and the Service by which it is found, if anybody looks for it."""
    match role:
        case Role.PREFILL | Role.DECODE:
            return [_stateful_set(role, config), _service(role, _health_ports(role, config), headless=True)]
        case Role.SCHEDULER:
            return [_deployment(role, config), _service(role, _ports(role, config), headless=True)]
        case Role.FRONTEND:
            return [_deployment(role, config), _service(role, _ports(role, config), headless=False)]
        case _:
            return [_deployment(role, config)]


def _deployment(role: Role, config: Config) -> Manifest:
    # there is one scheduler at a time: the old one ends before the next one begins
    strategy = (
        {"type": "Recreate"}
        if role is Role.SCHEDULER
        else {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    )
    spec = {"replicas": REPLICAS[role], "strategy": strategy, **_selected(role, config)}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": _metadata(role), "spec": spec}


def _stateful_set(role: Role, config: Config) -> Manifest:
    """Stable names, for people; engines need no order among themselves."""
    spec = {
        "replicas": REPLICAS[role],
        "serviceName": role.value,
        "podManagementPolicy": "Parallel",
        **_selected(role, config),
    }
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": _metadata(role), "spec": spec}


def _selected(role: Role, config: Config) -> Manifest:
    template = {"metadata": {"labels": labels(role)}, "spec": _pod(role, config)}
    return {"selector": {"matchLabels": labels(role)}, "template": template}


def _metadata(role: Role) -> Manifest:
    return {"name": role.value, "labels": labels(role)}


def _service(role: Role, ports: list[Manifest], headless: bool) -> Manifest:
    """headless: its name means the pods themselves, also those that are not ready."""
    spec: Manifest = {
        "selector": labels(role),
        "ports": [{"name": p["name"], "port": p["containerPort"], "targetPort": p["name"]} for p in ports],
    }
    if headless:
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, **spec}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(role), "spec": spec}


# -- pods --


def _pod(role: Role, config: Config) -> Manifest:
    volumes = _volumes(role, config)
    container: Manifest = {
        "name": role.value,
        "image": IMAGE,
        "command": ["tini", "--", *serve(role)],
        "env": _environment(role, config),
        "ports": [*_ports(role, config), *_health_ports(role, config)],
        "startupProbe": _probe(LIVE, every_s=2, patience_s=config.timeouts.start_s),
        "livenessProbe": _probe(LIVE, every_s=10, patience_s=30),
        "readinessProbe": _probe(READY, every_s=5, patience_s=config.timeouts.engines_s),
        "resources": _resources(role, config),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [mount for _, mount in volumes],
    }
    if role in MODEL_READERS:
        container["envFrom"] = [{"configMapRef": {"name": f"{NAME}-model"}}]
    if role is Role.FRONTEND:
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(LAST_CONNECTIONS_S)]}}}
    return {
        "terminationGracePeriodSeconds": grace_s(role, config),
        "automountServiceAccountToken": False,
        # else every Service of the namespace sets variables, some of which look like fields of the configuration
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [volume for volume, _ in volumes],
    }


def serve(role: Role) -> list[str]:
    return ["dualpath", "serve", role.value, "--config", CONFIG_FILE]


def grace_s(role: Role, config: Config) -> int:
    """Whole seconds from SIGTERM to SIGKILL: the drain, an engine's traffic manager after it, closing down."""
    drains = 2 if role in ENGINES else 1
    return ceil(drains * config.timeouts.drain_s + CLOSE_S) + (LAST_CONNECTIONS_S if role is Role.FRONTEND else 0)


def _ports(role: Role, config: Config) -> list[Manifest]:
    """Ports that others know beforehand."""
    if role is Role.SCHEDULER:
        return [{"name": "control", "containerPort": control_port(config)}]
    if role is Role.FRONTEND:
        return [{"name": "http", "containerPort": config.frontend.port}]
    return []


def _health_ports(role: Role, config: Config) -> list[Manifest]:
    ports = [{"name": "health", "containerPort": config.health.port}]
    if role in ENGINES:
        ports.append({"name": "tm-health", "containerPort": config.health.of_traffic_manager.port})
    return ports


def control_port(config: Config) -> int:
    return int(config.scheduler.control.rpartition(":")[2])


def _environment(role: Role, config: Config) -> list[Manifest]:
    """What differs from pod to pod, and what is Kubernetes' business; the rest is in the ConfigMaps."""
    host = "$(POD_IP)" if role is Role.SCHEDULER else Role.SCHEDULER.value  # a name cannot be bound
    fields = {"network.host": "$(POD_IP)", "scheduler.control": f"tcp://{host}:{control_port(config)}"}
    if role in NIC_OWNERS:
        fields |= {"network.snic": "$(POD_IP)", "network.cnic": "$(POD_IP)"}
    fields |= {"health.host": "$(POD_IP)", "health.port": str(config.health.port)}
    values = {f"DUALPATH_{field.replace('.', '__').upper()}": value for field, value in fields.items()} | ENVIRONMENT
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [address, *({"name": name, "value": value} for name, value in values.items())]


def _probe(path: str, every_s: int, patience_s: float) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "health"},
        "periodSeconds": every_s,
        "timeoutSeconds": 5,
        "failureThreshold": ceil(patience_s / every_s),
    }


def _engine(role: Role, config: Config) -> EngineConfig:
    return config.prefill if role is Role.PREFILL else config.decode


def kv_bytes(role: Role, config: Config) -> int:
    """KV that the pod's processes hold: device memory, buffers, staging."""
    if role is Role.STORAGE_GATEWAY:
        return config.storage.staging
    if role not in ENGINES:
        return 0
    tier = config.storage.tier if role is Role.PREFILL else 0
    return _engine(role, config).device_memory + _engine(role, config).buffer + tier


def _resources(role: Role, config: Config) -> Manifest:
    memory = f"{ceil((PROCESS_BYTES + kv_bytes(role, config)) / MIB)}Mi"
    return {"requests": {"cpu": CPUS[role], "memory": memory}, "limits": {"memory": memory}}


def _volumes(role: Role, config: Config) -> list[tuple[Manifest, Manifest]]:
    """Each with where it is mounted."""
    volumes: list[tuple[Manifest, Manifest]] = [
        (
            {"name": "config", "configMap": {"name": f"{NAME}-config"}},
            {"name": "config", "mountPath": str(PurePosixPath(CONFIG_FILE).parent), "readOnly": True},
        ),
        (
            {"name": "curve", "secret": {"secretName": f"{NAME}-curve", "defaultMode": 0o440}},
            {"name": "curve", "mountPath": config.security.curve_dir, "readOnly": True},
        ),
        ({"name": "tmp", "emptyDir": {}}, {"name": "tmp", "mountPath": "/tmp"}),
    ]
    if role in MODEL_READERS:
        claim = {"claimName": f"{NAME}-models", "readOnly": True}
        volumes.append(
            (
                {"name": "models", "persistentVolumeClaim": claim},
                {"name": "models", "mountPath": MODELS, "readOnly": True},
            )
        )
    if role is Role.STORAGE_GATEWAY:
        volumes.append(
            (
                {"name": "blocks", "persistentVolumeClaim": {"claimName": f"{NAME}-blocks"}},
                {"name": "blocks", "mountPath": config.storage.path},
            )
        )
    return volumes
