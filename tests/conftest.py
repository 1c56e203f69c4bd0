"""Settings that must be there before any test module imports torch."""

from __future__ import annotations

import os

# Three engines and a reference share few cores here: idle compute threads must sleep, not spin (as services.serve sets it)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
