"""The run."""

from __future__ import annotations


class Simulation:
    """See scenario.Happening."""
