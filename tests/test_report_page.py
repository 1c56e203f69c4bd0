"""The HTML report in a real browser: every plot is loaded, drawn and on the page. Needs Debian's package chromium."""

from __future__ import annotations

import json
import re
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from loadgen.report_html import write_report

pytestmark = pytest.mark.pictures

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--window-size=1300,2000",
)  # fmt: skip
#: Told by the browser once everything is loaded: of each picture what it is, its width in the file and on the page, and
#: the share of its pixels that are not background.
LOOK = """
<script>addEventListener("load", () => {
  const look = image => {
    const canvas = document.createElement("canvas");
    canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
    let drawn = 0;
    for (let at = 0; at < pixels.length; at += 4)
      drawn += pixels[at + 3] > 0 && (pixels[at] < 250 || pixels[at + 1] < 250 || pixels[at + 2] < 250);
    return {alt: image.alt, natural: image.naturalWidth, shown: image.getBoundingClientRect().width,
            drawn: 4 * drawn / pixels.length};
  };
  document.body.dataset.plots = JSON.stringify([...document.images].map(look));
});</script>
"""


def look(page: Path, directory: Path) -> list[dict[str, Any]]:
    """What a browser shows of a page's pictures."""
    looked_at = directory / "looked-at.html"
    looked_at.write_text(page.read_text().replace("</body>", f"{LOOK}</body>"))
    command = ["chromium", *FLAGS, f"--user-data-dir={directory / 'browser'}", "--dump-dom", looked_at.as_uri()]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)
    told = re.search(r'data-plots="([^"]*)"', done.stdout)
    assert told is not None, done.stderr[-2000:]
    return list(json.loads(unescape(told[1])))


def results() -> list[dict[str, Any]]:
    place = {"model": "ds-660b", "nodes": "2P4D", "agents": 64}
    times = {"basic": 200.0, "dualpath": 100.0, "oracle": 80.0}
    series = {"mean": 1.1, "at_s": [1, 2, 3], "max_over_avg": [1.2, None, 1.0]}
    jobs = [{"system": name, "repeat": 0, "job_s": job_s} for name, job_s in times.items()]
    jobs[0] |= {"balance": {"snic": series, "attention": None}, "ttft_parts_s": {"read": 1.0, "prefill": 0.5}}
    latency = {"mean": 0.1, "p50": 0.1, "p99": 0.2}
    loads = [{"system": name, "aps": aps, "ttft_s": latency, "tpot_s": latency} for name in times for aps in (0.1, 0.2)]
    return [{"kind": "compare", **place, "runs": jobs}, {"kind": "online", **place, "runs": loads}]


def test_a_browser_shows_every_plot(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_report(results(), page)
    plots = look(page, tmp_path)
    assert len(plots) == page.read_text().count("<img ") >= 4
    assert sum("Figure" in plot["alt"] for plot in plots) >= 4
    for plot in plots:
        assert plot["natural"] > 300 and plot["shown"] > 300, plot
        assert 0.005 < plot["drawn"] < 0.9, f"blank, or all of one colour: {plot}"
