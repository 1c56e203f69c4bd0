"""The tokens of every turn that ended well, as JSON lines, for a token-for-token check afterwards."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.errors import ConfigError
from loadgen.client import Completion
from loadgen.measure import TurnRecord
from loadgen.prompt import History


class Transcript:
    """Writes {"session", "turn", "prompt", "output", "cached_tokens"} a line, in a thread of its own: the agents do
    not wait for the disk. Use as a context manager. ConfigError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._error: OSError | None = None
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise self._refusal(error) from None
        self._writer = ThreadPoolExecutor(1, "transcript")

    def add(self, record: TurnRecord, prompt: History, answer: Completion) -> None:
        """Queue one turn; a failed one has nothing to compare and is left out."""
        if record.failure is None:
            row = {
                "session": record.session,
                "turn": record.turn,
                "prompt": prompt.tolist(),
                "output": answer.tokens,
                "cached_tokens": record.cached_tokens,
            }
            self._writer.submit(self._write, row)

    def _write(self, row: dict[str, object]) -> None:
        try:
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            self._error = self._error or error

    def _refusal(self, error: OSError) -> ConfigError:
        return ConfigError(f"transcript {self._path}: {error.strerror}: give a file in a writable directory")

    def __enter__(self) -> Transcript:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.shutdown(wait=True)
        self._file.close()
        if self._error is not None:
            raise self._refusal(self._error)
