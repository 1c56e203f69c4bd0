"""A discrete-event simulation of a cluster: the live scheduling policy and compute quota, on a virtual clock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import thread_time
from typing import Any

from loadgen.simulator.result import result
from loadgen.simulator.run import Simulation
from loadgen.simulator.scenario import Cluster, Happening, Overheads, Scenario, offline, online

__all__ = ["Cluster", "Happening", "Overheads", "Scenario", "offline", "online", "simulate"]


def simulate(scenario: Scenario, on_progress: Callable[[float], None] = lambda done: None) -> dict[str, Any]:
    """The outcome of a run, like that of loadgen.experiments.trial.trial() for a live cluster: job_s, makespan_s,
    turns_per_s, summaries of ttft_ms, ttst_ms, tpot_ms and jct_s, ttft_parts_s, balance, nic_bytes; and what
    simulating cost, under `simulator`. Deterministic, but for that cost. on_progress: told the share of turns that have
    ended, now and then. ConfigError for a scenario that cannot be."""
    begun = thread_time()
    run = Simulation(scenario, on_progress)
    with _no_collection():
        run.play()
    return result(run, thread_time() - begun)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A run leaves no cycles behind; looking for them among thousands of agents takes a tenth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
