"""What the scheduler tells members unasked: assignments, ends, and who comes and goes."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import DualPathError
from common.log import get_logger
from common.messages import Member, MemberJoined, MemberLeaving, MemberLeft
from common.rpc import Node
from services.scheduler.insist import insist
from services.scheduler.members import Members


class Notices:
    """Who cannot be reached is told again. One that is gone for good is found out by its heartbeats, and a repeated
    message changes nothing."""

    def __init__(self, node: Node, registry: Members) -> None:
        self._node = node
        self._registry = registry
        self._open = True
        self._log = get_logger()

    def tell(self, member: Member, msg: object) -> bool:
        """Once; whether it went."""
        try:
            self._node.send_to(member.incarnation.encode(), msg)
        except DualPathError as error:
            self._log.debug("not delivered", member=member.name, type=type(msg).__name__, error=str(error))
            return False
        return True

    def make_sure(
        self,
        member: Member,
        msg: object,
        wanted: Callable[[], bool] = lambda: True,
        failed: Callable[[], None] = lambda: None,
        patience_s: float = float("inf"),
    ) -> None:
        """Again and again while it is wanted and the member is there; failed() once patience is over."""

        def still() -> bool:
            return self._open and wanted() and self._registry.get(member.incarnation) is not None

        insist(lambda: self.tell(member, msg), still, failed, patience_s)

    def broadcast(self, msg: MemberJoined | MemberLeaving | MemberLeft, members: list[Member]) -> None:
        """Nobody says it again. Of one that has left since, only that it has left."""
        whom = msg.member.incarnation if isinstance(msg, MemberJoined) else msg.incarnation
        for member in members:
            self.make_sure(member, msg, lambda: isinstance(msg, MemberLeft) or self._registry.get(whom) is not None)

    def close(self) -> None:
        """Tell nobody again."""
        self._open = False
