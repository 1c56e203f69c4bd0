"""The tokens of every turn that ended well, as JSON lines, for a token-for-token check afterwards."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiofiles

from common.errors import ConfigError
from loadgen.client.endpoint import Completion
from loadgen.client.prompt import History
from loadgen.measures.turns import TurnRecord


class Transcript:
    """Writes {"session", "turn", "prompt", "output", "cached_tokens"} a line; the agents do not wait for the disk.

    An async context; leaving it waits for the last line. ConfigError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: asyncio.Queue[dict[str, object] | None] = asyncio.Queue()

    def add(self, record: TurnRecord, prompt: History, answer: Completion) -> None:
        """Queue one turn; a failed one has nothing to compare and is left out."""
        if record.failure is None:
            row: dict[str, object] = {
                "session": record.session,
                "turn": record.turn,
                "prompt": prompt.tolist(),
                "output": answer.tokens,
                "cached_tokens": record.cached_tokens,
            }
            self._rows.put_nowait(row)

    async def __aenter__(self) -> Transcript:
        try:
            self._file = await aiofiles.open(self._path, "w", encoding="utf-8")
        except OSError as error:
            raise self._refusal(error) from None
        self._writer = asyncio.create_task(self._write())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._rows.put_nowait(None)
        try:
            await self._writer
        except OSError as error:
            raise self._refusal(error) from None
        finally:
            await self._file.close()

    async def _write(self) -> None:
        while (row := await self._rows.get()) is not None:
            await self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
            await self._file.flush()

    def _refusal(self, error: OSError) -> ConfigError:
        return ConfigError(f"transcript {self._path}: {error.strerror}: give a file in a writable directory")
