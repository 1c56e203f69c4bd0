"""A way for parts of an answer's body that costs less than ASGI's: past the application's layers, which would let them
through as they are, and without a task that waits."""

from __future__ import annotations

import weakref

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

#: The key of a request's Outlet in its scope.
OUTLET = "dualpath.outlet"


class Outlet:
    """Of one answer whose start has been sent, to whoever would send the next part."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def free(self) -> bool:
        """False while the client reads so slowly that what is sent has to wait: that is send()'s to do."""
        return not self._cycle.flow.write_paused

    def write(self, body: bytes) -> None:
        """Send this now, while free; there is more to come. For a client that has gone nothing happens."""
        sending = self._cycle.send({"type": "http.response.body", "body": body, "more_body": True})
        try:
            sending.send(None)
        except StopIteration:
            return
        sending.close()
        raise RuntimeError("what was to be sent at once had to wait")


class OutletProtocol(HttpToolsProtocol):
    """uvicorn's, with an Outlet for each request."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        # weak: the scope is the cycle's own, and there is an answer to send for as long as the server keeps that
        self.scope[OUTLET] = Outlet(weakref.proxy(self.cycle))  # type: ignore[literal-required]
