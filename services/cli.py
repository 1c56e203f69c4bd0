"""`dualpath`: run a cluster, one process of it, or the demo.

`serve` is dispatched before anything else is imported: a control process stays small.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The console script."""
    if sys.argv[1:2] == ["serve"]:
        from services.serve import main as serve

        sys.exit(serve(sys.argv[2:]))
    from services.launcher.commands import app

    app()


if __name__ == "__main__":
    main()
