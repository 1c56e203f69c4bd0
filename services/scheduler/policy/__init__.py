"""Scheduling decisions, pure: handle(event, now) -> [action]. The live scheduler and the simulator drive this code."""

from services.scheduler.policy.actions import Action, CancelOn, Fail, Start
from services.scheduler.policy.events import (
    EngineDraining,
    EngineJoined,
    EngineLeft,
    Event,
    Fetched,
    KvHandedOver,
    PrefillEnded,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestErred,
)
from services.scheduler.policy.policy import Policy, PolicyConfig

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
    "Policy",
    "PolicyConfig",
    "PrefillEnded",
    "RequestArrived",
    "RequestCancelled",
    "RequestEnded",
    "RequestErred",
    "Start",
]
