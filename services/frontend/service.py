"""The front end process: clients' HTTP on one side, the control plane on the other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from common.config import Config
from common.errors import DualPathError, ErrorCode
from common.messages import Member
from common.service import Service
from common.types import Role
from services.frontend.api import build_app
from services.frontend.latencies import TimedAnswers
from services.frontend.model import ServedModel, load_model
from services.frontend.requests import Requests
from services.frontend.server import HttpServer
from services.frontend.tenants import Tenants, load_tenants

ENGINE_ROLES = (Role.PREFILL, Role.DECODE)
#: Requests in hand whose objects the garbage collector looks at within a few milliseconds.
CALM_REQUESTS = 16


class Frontend(Service):
    """OpenAI-compatible endpoint. url: where it really listens, from start() on."""

    role = Role.FRONTEND
    needs = ENGINE_ROLES
    url: str
    model: ServedModel
    requests: Requests
    tenants: Tenants

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(config, name)
        self._server = HttpServer(config.frontend.host, config.frontend.port)

    async def open(self) -> None:
        self.url = self._server.bind()
        self.tenants = await asyncio.to_thread(load_tenants, self.config.frontend.api_keys)
        self.model = await asyncio.to_thread(load_model, self.config)
        manifest, eos_ids = self.model.manifest, self.model.eos_ids
        self.requests = Requests(self.config, self.node, self.metrics, manifest, eos_ids, self.enrolled, self.tracer)
        self._server.start(TimedAnswers(build_app(self), self.metrics), self.fail)

    def describe(self, member: Member) -> Member:
        return replace(member, manifest=self.model.manifest)

    @property
    def context_limit(self) -> int:
        """Tokens of prompt and output together that the model allows and every engine can hold."""
        capacities = [member.capacity for role in ENGINE_ROLES for member in self.members_of(role)]
        limits = [capacity.max_context_tokens for capacity in capacities if capacity is not None]
        return min([self.model.max_context_tokens, *limits])

    def not_ready(self) -> DualPathError | None:
        """Why no request can be served now, or None."""
        if (error := super().not_ready()) is not None:
            return error
        missing = [role.value for role in ENGINE_ROLES if not self.members_of(role)]
        if missing:
            return DualPathError(ErrorCode.NO_ENGINES, f"no live {' and no live '.join(missing)} engine")
        return None

    def scheduler_replaced(self) -> None:
        self.requests.restart_all()

    async def drain(self) -> None:
        await self.requests.ended()

    def calm(self) -> bool:
        return len(self.requests) <= CALM_REQUESTS

    async def shut(self) -> None:
        if hasattr(self, "requests"):
            self.requests.fail_all(DualPathError(ErrorCode.DEADLINE, "this front end has shut down"))
        await self._server.stop()
