"""How much work a front end takes on at once: what is over the bounds is refused at once, not queued. Pure."""

from __future__ import annotations

from collections import Counter

from common.errors import DualPathError, ErrorCode
from services.frontend.errors import RETRY_AFTER_S, ApiError
from services.frontend.tenants import Tenant


class Admission:
    """max_pending: requests in hand. max_queued_tokens: prompt tokens of those whose first token has not come; 0: any
    number. A request that is alone is never refused for its length."""

    def __init__(self, max_pending: int, max_queued_tokens: int) -> None:
        self.in_hand = 0
        self.queued_tokens = 0
        self._max_pending = max_pending
        self._max_queued_tokens = max_queued_tokens
        self._of_tenant: Counter[str] = Counter()

    def take(self, tenant: Tenant, count: int) -> None:
        """Places for so many requests, all or none. DualPathError OVERLOADED where there are no more; ApiError 429
        where the tenant has as many as it may."""
        if tenant.max_pending and self._of_tenant[tenant.name] + count > tenant.max_pending:
            message = f"{tenant.max_pending} requests of this API key's tenant are in hand already; try again later"
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            raise ApiError(message, status=429, code="rate_limit_exceeded", headers=headers)
        if self.in_hand + count > self._max_pending:
            detail = f"{self._max_pending} requests are in hand already; try again later"
            raise DualPathError(ErrorCode.OVERLOADED, detail)
        self.in_hand += count
        self._of_tenant[tenant.name] += count

    def give_back(self, tenant: Tenant, count: int) -> None:
        self.in_hand -= count
        self._of_tenant[tenant.name] -= count

    def queue(self, tokens: int) -> None:
        """Prompts of so many tokens are to wait for their first token. DualPathError OVERLOADED."""
        limit = self._max_queued_tokens
        if limit and self.queued_tokens and self.queued_tokens + tokens > limit:
            detail = f"prompts of {self.queued_tokens} tokens wait already, of at most {limit}; try again later"
            raise DualPathError(ErrorCode.OVERLOADED, detail)
        self.queued_tokens += tokens

    def unqueue(self, tokens: int) -> None:
        """They wait no more."""
        self.queued_tokens -= tokens
