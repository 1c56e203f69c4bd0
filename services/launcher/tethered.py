"""`python -m services.launcher.tethered MODULE ARGS...`: run a module in a process that ends when its stdin closes.

For children that know nothing of lifelines (pip, the load generator): a killed parent leaves none of them behind.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _follow_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_follow_parent, name="lifeline", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
