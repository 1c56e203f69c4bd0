"""Scheduling decisions, pure: handle(event, now) -> [action]. The live scheduler and the simulator drive this code."""

from services.scheduler.policy.actions import Action, CancelOn, Fail, Start
from services.scheduler.policy.events import (
    EngineDraining,
    EngineJoined,
    EngineLeft,
    Event,
    Fetched,
    KvHandedOver,
    Load,
    PrefillEnded,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestErred,
)
from services.scheduler.policy.integrity import check_integrity
from services.scheduler.policy.policy import Policy
from services.scheduler.policy.role_view import NodeLoad, View, observe
from services.scheduler.policy.roles import RoleController, RolesConfig, SwitchRole
from services.scheduler.policy.state import PolicyConfig, ReadSide

__all__ = [
    "Action",
    "CancelOn",
    "EngineDraining",
    "EngineJoined",
    "EngineLeft",
    "Event",
    "Fail",
    "Fetched",
    "KvHandedOver",
    "Load",
    "NodeLoad",
    "Policy",
    "PolicyConfig",
    "PrefillEnded",
    "ReadSide",
    "RequestArrived",
    "RequestCancelled",
    "RequestEnded",
    "RequestErred",
    "RoleController",
    "RolesConfig",
    "Start",
    "SwitchRole",
    "View",
    "check_integrity",
    "observe",
]
