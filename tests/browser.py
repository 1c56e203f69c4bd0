"""A page in headless Chromium: what it shows of its pictures, and a screenshot for people."""

from __future__ import annotations

import json
import re
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
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
    shown = _chromium(directory, "--window-size=1300,2000", "--dump-dom", looked_at.as_uri())
    told = re.search(r'data-plots="([^"]*)"', shown)
    assert told is not None, shown[-2000:]
    return list(json.loads(unescape(told[1])))


def screenshot(page: Path, picture: Path, width: int, height: int) -> None:
    _chromium(picture.parent, f"--window-size={width},{height}", f"--screenshot={picture}", page.as_uri())


def _chromium(directory: Path, *arguments: str) -> str:
    command = ["chromium", *FLAGS, f"--user-data-dir={directory / 'browser'}", *arguments]
    done = subprocess.run(command, text=True, capture_output=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
