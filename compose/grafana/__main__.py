"""Writes the dashboards beside this file."""

from __future__ import annotations

import json
from pathlib import Path

from compose.grafana.dashboard import render
from compose.grafana.data_plane import DATA_PLANE
from compose.grafana.overview import OVERVIEW

DIRECTORY = Path(__file__).parent / "dashboards"


def files() -> dict[Path, str]:
    """What is to be in each file."""
    return {
        DIRECTORY / f"{dashboard.uid}.json": json.dumps(render(dashboard), indent=2) + "\n"
        for dashboard in (OVERVIEW, DATA_PLANE)
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
