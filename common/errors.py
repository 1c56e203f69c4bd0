"""Errors that cross process borders: a code for programs, a sentence for people."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Every way in which a request, a call or a process start can fail."""

    BAD_REQUEST = "bad_request"              # the client's input; never retried
    OVERLOADED = "overloaded"                # a bounded queue is full
    NO_ENGINES = "no_engines"                # no live prefill or decode engine
    ENGINE_LOST = "engine_lost"              # a process that held the request died
    PREEMPTED = "preempted"                  # device memory ran out; goes on in a new attempt
    MOVED = "moved"                          # a process ends in good order, or starts anew; goes on in a new attempt
    TRANSFER_FAILED = "transfer_failed"      # bytes did not arrive, or not in time
    STORAGE_FAILED = "storage_failed"        # storage did not answer, or not in time
    DEADLINE = "deadline"                    # the request's own deadline passed
    CANCELLED = "cancelled"                  # the client went away
    DRAINING = "draining"                    # the process takes no new work
    MISMATCH = "mismatch"                    # version, model or geometry differ
    MALFORMED = "malformed"                  # a message that cannot be read
    UNREACHABLE = "unreachable"              # no such peer, or it does not answer
    STRANGER = "stranger"                    # not registered with this scheduler
    INTERNAL = "internal"                    # a defect


#: A front end may start a new attempt after these: nothing about the request itself is wrong.
RETRYABLE = frozenset(
    {
        ErrorCode.ENGINE_LOST,
        ErrorCode.PREEMPTED,
        ErrorCode.MOVED,
        ErrorCode.TRANSFER_FAILED,
        ErrorCode.STORAGE_FAILED,
        ErrorCode.UNREACHABLE,
        ErrorCode.STRANGER,
        ErrorCode.DRAINING,
    }
)

#: Of these, nothing went wrong: they do not count as failures of the request.
PLANNED = frozenset({ErrorCode.PREEMPTED, ErrorCode.MOVED, ErrorCode.DRAINING, ErrorCode.STRANGER})


class DualPathError(Exception):
    """A failure with a code. Raised locally, or re-raised from a peer's error reply."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message


class ConfigError(Exception):
    """Start-up cannot go on: one line that says what to do. The command line prints it and exits with status 2."""
