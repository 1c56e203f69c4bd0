"""Running another program of the installation to its end: pip, the load generator, the reference.

They are children, not imports: they can be stopped at any moment, and what they load goes with them.
"""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Callable

from common.children import Child, python_module
from common.errors import ConfigError

KEPT_LINES = 200


class ToolError(ConfigError):
    """A tool ended badly. The message is what it said last; output holds its last lines."""

    def __init__(self, name: str, status: int, output: list[str]) -> None:
        lines = [line.strip() for line in output if line.strip()]
        said = [line for line in lines if line.lower().startswith("error: ")] or lines
        words = said[-1] if said else f"{name} ended with status {status}"
        super().__init__(words.removeprefix("error: ").removeprefix("ERROR: "))
        self.status = status
        self.output = output


async def run_tool(
    module: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Run a module until it ends; the last lines of its output, both streams together. on_line gets each as it comes.

    ToolError unless it ends with status 0. When cancelled the tool is killed, with all that it has started.
    """
    child = Child(
        module,
        python_module("services.launcher.tethered", module, *arguments),
        log=subprocess.STDOUT,
        environment=environment,
    )
    output: deque[str] = deque(maxlen=KEPT_LINES)
    try:
        while (line := await child.readline()) is not None:
            output.append(line)
            on_line(line)
        status = await child.ended()
    finally:
        child.kill()
    if status:
        raise ToolError(module, status, list(output))
    return list(output)


def last_json(output: list[str]) -> str:
    """The last line that is a JSON object: how a tool hands back its result."""
    return next(line for line in reversed(output) if line.startswith("{"))
