"""Settings that must be there before any test module imports torch."""

from __future__ import annotations

import os

# Engines and a reference share few cores here: idle compute threads must sleep, not spin (services.serve does the same)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
