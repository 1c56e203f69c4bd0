"""Closed and open loop: who is played when, and with which history (case E09)."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.workload.scaling import Selection, Workload
from common.workload.text import TokenText
from common.workload.trajectories import Trajectory, Turn
from loadgen.client.endpoint import Client
from loadgen.measures.turns import RunLog, Slo, measure, steady_window
from loadgen.progress import ProgressMode
from loadgen.replay.agent import Agent
from loadgen.replay.closed_loop import replay
from loadgen.replay.open_loop import online, schedule
from loadgen.replay.run import Options, Plan, run
from loadgen.replay.transcript import Transcript
from tests.loadgen_mock import LIMIT, MockServer, Reply, answer_well, expected_tokens

TEXT = TokenText(range(1000, 9000))
BRANCHING = Trajectory("branching", (Turn(0, 100, 5), Turn(105, 20, 3), Turn(64, 10, 2), Turn(76, 1, 1, think_s=0.5)))


def one_turn(name: str) -> Trajectory:
    return Trajectory(name, (Turn(0, 10, 2),))


def agent_for(client: Client, offered: int = 0, think: bool = False) -> Agent:
    return Agent(client, "mock", TEXT, RunLog(offered, time.monotonic()), think, lambda record, prompt, answer: None)


async def test_turns_carry_the_history_that_was_really_generated() -> None:
    async with MockServer() as server, Client(server.url) as client:
        agent = agent_for(client)
        await agent.play(BRANCHING, agent.log.started)
    new = TEXT.stream("branching")
    history: list[int] = []
    for turn, body in zip(BRANCHING.turns, server.bodies, strict=True):
        assert body["prompt"] == history[: turn.context] + new.take(turn.append)
        assert body["max_tokens"] == turn.generate
        history = body["prompt"] + expected_tokens(body["prompt"], turn.generate)
    (record,) = agent.log.trajectories
    assert record.completed
    assert record.ended == agent.log.turns[-1].times[-1]


async def test_each_turn_is_due_when_the_one_before_has_ended() -> None:
    async with MockServer() as server, Client(server.url) as client:
        agent = agent_for(client)
        await agent.play(BRANCHING, agent.log.started)
    turns = agent.log.turns
    assert turns[0].intended == agent.log.started
    for before, after in pairwise(turns):
        assert after.intended == before.ended
        assert after.started >= after.intended


async def test_think_times_are_kept_on_request() -> None:
    async with MockServer() as server, Client(server.url) as client:
        agent = agent_for(client, think=True)
        await agent.play(BRANCHING, agent.log.started)
    turns = agent.log.turns
    assert turns[3].intended == pytest.approx(turns[2].ended + 0.5)
    assert turns[3].started >= turns[3].intended
    assert turns[3].ttft is not None
    assert turns[3].ttft < 0.45, "thinking is not latency"


async def test_closed_loop_keeps_n_agents_busy_and_plays_everything_once() -> None:
    async def slow(reply: Reply) -> None:
        await asyncio.sleep(0.01)
        await answer_well(reply)

    trajectories = [one_turn(f"t{i}") for i in range(20)]
    async with MockServer(slow) as server, Client(server.url) as client:
        agent = agent_for(client)
        await replay(agent, trajectories, agents=3)
    assert server.peak == 3
    assert sorted(t.session for t in agent.log.trajectories) == sorted(t.name for t in trajectories)
    starts = sorted(agent.log.turns, key=lambda turn: turn.started)
    assert [turn.session for turn in starts] == [t.name for t in trajectories]
    first_end = min(turn.ended for turn in agent.log.turns)
    assert agent.log.last_start is not None
    assert first_end < agent.log.last_start <= starts[-1].started
    assert steady_window(agent.log) is not None


async def test_the_next_session_is_due_when_the_agent_is_free() -> None:
    async with MockServer() as server, Client(server.url) as client:
        agent = agent_for(client)
        await replay(agent, [one_turn(f"t{i}") for i in range(5)], agents=1)
    turns = agent.log.turns
    assert turns[0].intended == agent.log.started
    assert agent.log.last_start == turns[-1].intended
    for before, after in pairwise(turns):
        assert before.ended <= after.intended <= after.started


async def test_a_failed_turn_ends_its_trajectory_only(tmp_path: Path) -> None:
    async def answer(reply: Reply) -> None:
        if len(reply.prompt) == 125:
            reply.reset()
        else:
            await answer_well(reply)

    file = tmp_path / "transcript.jsonl"
    async with MockServer(answer) as server, Client(server.url) as client:
        agent = agent_for(client, offered=5)
        async with Transcript(file) as transcript:
            agent.observe = transcript.add
            await replay(agent, [BRANCHING, one_turn("other")], agents=1)
        agent.log.ended = time.monotonic()
    result = measure(agent.log, Slo())
    assert (result["offered"], result["attempted"], result["turns"], result["failed"]) == (5, 3, 2, 1)
    assert result["trajectories"] == {"completed": 1, "failed": 1}
    assert result["jct_s"]["n"] == 1
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["session"], row["turn"]) for row in written] == [("branching", 0), ("other", 0)]


async def test_a_reply_of_the_wrong_length_shortens_the_history() -> None:
    async def short(reply: Reply) -> None:
        await reply.start()
        await reply.token(0)
        await reply.event("[DONE]")
        await reply.end()

    async with MockServer(short) as server, Client(server.url) as client:
        agent = agent_for(client)
        await agent.play(BRANCHING, agent.log.started)
    assert [len(body["prompt"]) for body in server.bodies] == [100, 121, 74, 76]
    assert sum(bool(turn.violations) for turn in agent.log.turns) == 3


def test_schedule_is_decided_by_the_seed() -> None:
    set_ = [one_turn(f"t{i}") for i in range(5)]
    arrivals = schedule(set_, 10.0, 30.0, seed=3)
    assert arrivals == schedule(set_, 10.0, 30.0, seed=3)
    assert arrivals != schedule(set_, 10.0, 30.0, seed=4)
    names = [arrival.name for arrival in arrivals]
    assert len(set(names)) == len(names)
    assert {arrival.trajectory.name for arrival in arrivals} == {t.name for t in set_}
    assert not set(names) & {arrival.name for arrival in schedule(set_, 10.0, 30.0, seed=4)}
    with pytest.raises(ConfigError, match="no agent arrives in 1 s"):
        schedule(set_, 1e-6, 1.0, seed=3)


async def test_e09_a_stall_is_in_the_latencies_and_not_in_the_schedule() -> None:
    begun = time.monotonic()

    async def stalls(reply: Reply) -> None:
        await asyncio.sleep(max(0.0, stall_ends - time.monotonic()) if time.monotonic() > stall_begins else 0.0)
        await answer_well(reply)

    arrivals = schedule([one_turn("t")], aps=60.0, duration=2.0, seed=5)
    async with MockServer(stalls) as server, Client(server.url) as client:
        agent = agent_for(client)
        begun = agent.log.started
        stall_begins, stall_ends = begun + 0.5, begun + 1.5
        await online(agent, arrivals)
        agent.log.ended = time.monotonic()
    turns = sorted(agent.log.turns, key=lambda turn: turn.intended)
    assert [turn.intended - begun for turn in turns] == pytest.approx([arrival.at for arrival in arrivals])
    assert all(turn.intended <= turn.started < turn.intended + 0.6 for turn in turns), "nobody waits for the server"
    stalled = [turn for turn in turns if 0.5 < turn.intended - begun < 1.4]
    assert len(stalled) > 30
    for turn in stalled:
        assert turn.ttft is not None
        assert turn.ttft >= stall_ends - turn.intended
    assert agent.log.last_start == turns[-1].intended
    result = measure(agent.log, Slo())
    assert result["ttft_ms"]["p95"] > 700
    assert result["ttft_from_send_ms"]["n"] == result["ttft_ms"]["n"] == len(arrivals)


async def test_turns_of_a_trajectory_keep_their_order_in_the_open_loop() -> None:
    arrivals = schedule([BRANCHING], aps=100.0, duration=0.2, seed=1)
    async with MockServer() as server, Client(server.url) as client:
        agent = agent_for(client)
        await online(agent, arrivals)
    by_session: dict[str, list[int]] = {}
    for turn in agent.log.turns:
        by_session.setdefault(turn.session, []).append(turn.turn)
    assert by_session == {arrival.name: [0, 1, 2, 3] for arrival in arrivals}
    firsts = [tuple(body["prompt"][:64]) for body in server.bodies if len(body["prompt"]) == 100]
    assert len(set(firsts)) == len(arrivals), "no arrival hits what another stored"


async def test_a_whole_run_with_transcript(tmp_path: Path) -> None:
    rows = [{"id": f"s{i}", "turns": [[0, 300, 9, 0.0, 1.0, "f"], [309, 50, 6, 9.0, 1.0, "a"]]} for i in range(4)]
    file = tmp_path / "sessions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    transcript = tmp_path / "transcript.jsonl"

    def plan(workload: Workload) -> Plan:
        return Plan({"mode": "replay"}, workload.num_turns, 2, lambda agent: replay(agent, workload.trajectories, 2))

    async with MockServer() as server:
        options = Options(
            server.url, file, Selection(max_context=122), Slo(), transcript=transcript, progress=ProgressMode.NONE
        )
        result = await run(options, plan)
    assert (result["turns"], result["failed"], result["violations"]) == (8, 0, 0)
    assert result["scaling"]["factors"] == {f"s{i}": 3 for i in range(4)}
    assert result["scaling"]["model_limit"] == LIMIT
    assert result["prompt_tokens"] == sum(len(body["prompt"]) for body in server.bodies)
    assert result["hit_tokens"] == 4 * (64 + 64)
    assert result["generated_tokens"] == 4 * (3 + 2)
    assert len(result["records"]) == 8
    written = [json.loads(line) for line in transcript.read_text().splitlines()]
    assert len(written) == 8
    for row in written:
        assert row["output"] == expected_tokens(row["prompt"], len(row["output"]))
        assert row["cached_tokens"] == (len(row["prompt"]) - 1) // 64 * 64
    assert sorted((row["session"], row["turn"]) for row in written) == [(f"s{i}", j) for i in range(4) for j in (0, 1)]
