"""The queue of arrivals: what fits of its first requests is counted as if it were counted anew."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.state import ArrivalQueue, Request


def request(arrival: int, tokens: int) -> Request:
    return Request((str(arrival), 0), tokens, 0, 1, arrival)


def counted(queue: ArrivalQueue, limit: int) -> int:
    total = 0
    for waiting in queue.values():
        if total + waiting.num_tokens > limit:
            break
        total += waiting.num_tokens
    return total


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 50)),
            st.tuples(st.just("remove"), st.integers(0, 200)),
            st.tuples(st.just("back"), st.integers(0, 200)),
            st.tuples(st.just("ask"), st.integers(0, 600)),
        ),
        max_size=300,
    )
)
def test_fitting_is_what_a_count_says(steps: list[tuple[str, int]]) -> None:
    queue, gone, arrivals = ArrivalQueue(), [], 0
    for step, number in steps:
        if step == "add":
            queue.add(request(arrivals, number))
            arrivals += 1
        elif step == "remove" and queue:
            gone.append(list(queue.values())[number % len(queue)])
            queue.remove(gone[-1])
        elif step == "back" and gone:
            queue.add(gone.pop(number % len(gone)))
        elif step == "ask":
            assert queue.fitting(number) == counted(queue, number)
    for limit in range(0, 400, 37):
        assert queue.fitting(limit) == counted(queue, limit)


def test_the_first_requests_only() -> None:
    queue = ArrivalQueue()
    for arrival, tokens in enumerate((10, 30, 5)):
        queue.add(request(arrival, tokens))
    assert [queue.fitting(limit) for limit in (9, 10, 39, 40, 44, 45, 99)] == [0, 10, 10, 40, 40, 45, 45]
    queue.remove(queue.head)
    assert [queue.fitting(limit) for limit in (29, 30, 35)] == [0, 30, 35]
