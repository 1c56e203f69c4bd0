"""How long clients wait, as histograms: tokens of a request, and answers of the HTTP server by their status."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.clock import monotonic
from common.metrics import Metrics
from services.frontend.client_request import ClientRequest

#: Upper bounds, seconds.
TOKEN_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
REQUEST_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
ANSWER_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)


class Latencies:
    """Of requests that ended well, lost attempts included (spec §10)."""

    def __init__(self, metrics: Metrics) -> None:
        new = metrics.histogram
        self._first = new("time_to_first_token_seconds", "From submission to the first token", REQUEST_BOUNDS_S)
        self._second = new("time_to_second_token_seconds", "From the first token to the second", TOKEN_BOUNDS_S)
        self._each = new("time_per_output_token_seconds", "Mean of a request, from its second token on", TOKEN_BOUNDS_S)
        self._whole = new("request_duration_seconds", "From submission to the last token", REQUEST_BOUNDS_S)

    def ended(self, request: ClientRequest) -> None:
        """A request has all of its tokens."""
        times, count = request.token_times, request.usage.completion
        if not times:
            return
        self._first.observe(times[0] - request.submitted_at)
        self._whole.observe(times[-1] - request.submitted_at)
        if len(times) > 1:
            self._second.observe(times[1] - times[0])
            self._each.observe((times[-1] - times[0]) / max(count - 1, 1))


class TimedAnswers:
    """An ASGI application, timed from the headers of a request to those of its answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._seconds = metrics.histogram(
            "http_response_seconds", "From a request's headers to those of its answer", ANSWER_BOUNDS_S, ("status",)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = monotonic()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._seconds.labels(str(message["status"])).observe(monotonic() - began)
            await send(message)

        await self._app(scope, receive, timed)
