"""The dashboard to look at first: what clients see, what waits where, how much storage helps, how even the load is."""

from __future__ import annotations

from compose.grafana.dashboard import RATE, Dashboard, Panel, Query, Row, Stat, by_process

#: Outcomes of requests that are not failures of ours.
WELL = "stop|length|cancelled"


def _quantiles(of: str) -> tuple[Query, ...]:
    return (Query(f"dualpath:{of}_seconds:quantile_rate1m", "p{{quantile}}"),)


def _median(of: str) -> tuple[Query, ...]:
    return (Query(f'dualpath:{of}_seconds:quantile_rate1m{{quantile="0.5"}}'),)


NOW = Row(
    "Now",
    (
        Stat(
            "Throughput",
            "reqps",
            (Query(f"sum(rate(dualpath_requests_total[{RATE}]))"),),
            "Requests that end, a second",
        ),
        Stat(
            "Ended well",
            "percentunit",
            (
                Query(
                    f'sum(rate(dualpath_requests_total{{outcome=~"{WELL}"}}[{RATE}]))'
                    f" / sum(rate(dualpath_requests_total[{RATE}]))"
                ),
            ),
            "Share of the requests that end, without those that the client gave up. Refused ones are not among them.",
            top=1,
        ),
        Stat("TTFT, median", "s", _median("time_to_first_token"), "Time to the first token, over the last minute"),
        Stat("TPOT, median", "s", _median("time_per_output_token"), "Time per output token, over the last minute"),
        Stat(
            "Hit rate",
            "percentunit",
            (Query("dualpath:cached_tokens:ratio_rate1m"),),
            "Share of prompt tokens whose KV was in storage, over the last minute. Agents' turns hit more than 95 %.",
            top=1,
        ),
        Stat("Waiting", "short", (Query("sum(dualpath_requests_waiting)"),), "Requests without engines as yet"),
        Stat("Prefill engines", "short", (Query('sum(dualpath_members{role="prefill"})'),), "That are registered"),
        Stat("Decode engines", "short", (Query('sum(dualpath_members{role="decode"})'),), "That are registered"),
    ),
)

CLIENTS = Row(
    "What clients see",
    (
        Panel(
            "Time to first token (TTFT)",
            "s",
            _quantiles("time_to_first_token"),
            "From submission to the first token, of requests that ended well. Grows with what waits before prefill.",
        ),
        Panel(
            "Time to second token (TTST)",
            "s",
            _quantiles("time_to_second_token"),
            "From the first token to the second: the handoff to the decode engine is in it.",
        ),
        Panel(
            "Time per output token (TPOT)",
            "s",
            _quantiles("time_per_output_token"),
            "Mean of each request, from its second token on. Grows with the batches of the decode engines.",
        ),
        Panel(
            "Requests by outcome",
            "reqps",
            (Query(f"sum by (outcome) (rate(dualpath_requests_total[{RATE}]))", "{{outcome}}"),),
            "Requests that end, by finish reason or error code.",
            stacked=True,
        ),
        Panel(
            "Refused, and tried again",
            "reqps",
            (
                Query(f"sum by (reason) (rate(dualpath_requests_refused_total[{RATE}]))", "refused: {{reason}}"),
                Query(f"sum by (code) (rate(dualpath_retries_total[{RATE}]))", "attempt lost: {{code}}"),
            ),
            "Calls that found no place, by reason; and attempts that were lost and followed by another, by error code. "
            "Clients see nothing of the latter but time.",
        ),
        Panel(
            "HTTP answers by status",
            "reqps",
            (Query(f"sum by (status) (rate(dualpath_http_response_seconds_count[{RATE}]))", "{{status}}"),),
            "Of the front ends, /health and the like included.",
            stacked=True,
        ),
    ),
)

QUEUES = Row(
    "Queues",
    (
        Panel(
            "Requests in hand",
            "short",
            (
                Query("sum(dualpath_requests_in_hand)", "in hand at front ends"),
                Query("sum(dualpath_requests_waiting)", "waiting for engines"),
                Query("sum(dualpath_requests_running)", "at engines"),
            ),
            "Of the whole cluster.",
        ),
        Panel(
            "Requests by engine",
            "short",
            (Query(by_process("dualpath_engine_requests"), "{{name}}"),),
            "Assigned to each engine and not ended there.",
        ),
        Panel(
            "Read queue by engine (tokens)",
            "short",
            (Query(by_process("dualpath_read_queue_tokens"), "{{name}}"),),
            "Hit tokens of staged requests that are not in the buffer yet: the shorter side reads.",
        ),
        Panel(
            "Prompt tokens without a first token",
            "short",
            (Query("sum(dualpath_queued_tokens)", "tokens"),),
            "Over all front ends; frontend.max_queued_tokens bounds it.",
        ),
        Panel(
            "Running batch by decode engine",
            "short",
            (Query(by_process("dualpath_decode_running_requests"), "{{name}}"),),
            "decode.max_running bounds it.",
        ),
        Panel(
            "Waiting for buffer slots",
            "short",
            (Query(by_process("dualpath_buffer_waiting_requests"), "{{name}}"),),
            "Requests that are assigned and wait for staging memory: enlarge the role's buffer.",
        ),
    ),
)

CACHE = Row(
    "KV-cache",
    (
        Panel(
            "Prompt tokens",
            "short",
            (
                Query(f"sum(rate(dualpath_cached_tokens_total[{RATE}]))", "found in storage"),
                Query(f"sum(rate(dualpath_prefill_tokens_total[{RATE}]))", "computed"),
            ),
            "Tokens a second, of requests whose prefill begins.",
            stacked=True,
        ),
        Panel(
            "Hit rate over time",
            "percentunit",
            (Query("dualpath:cached_tokens:ratio_rate1m", "of prompt tokens"),),
            "Share of prompt tokens whose KV was in storage.",
            top=1,
        ),
        Panel(
            "Read from storage, by path",
            "Bps",
            (Query(f"sum by (path) (rate(dualpath_storage_read_path_bytes_total[{RATE}]))", "{{path}}"),),
            "pe: read by the prefill side; de: by the decode side, which forwards it; split: a request read by both.",
            stacked=True,
        ),
        Panel(
            "Storage NICs, max/avg over nodes",
            "short",
            (Query("dualpath:node_snic_bytes:max_over_avg_rate1m", "bytes, both ways"),),
            "1 is an even load. With two paths it stays near it; much above, one side reads alone.",
        ),
        Panel(
            "Attention, max/avg over prefill engines",
            "short",
            (Query("dualpath:attention_seconds:max_over_avg_rate1m", "predicted time"),),
            "1 is an even load. Only where attention is predicted: profiled models, or perf.predictor.",
        ),
        Panel(
            "Tokens generated",
            "short",
            (Query(by_process(f"rate(dualpath_decode_tokens_total[{RATE}])"), "{{name}}"),),
            "Tokens a second, by decode engine.",
            stacked=True,
        ),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        Panel(
            "Members",
            "short",
            (Query("sum by (role) (dualpath_members)", "{{role}}"),),
            "Registered with the scheduler.",
        ),
        Panel(
            "CPU",
            "short",
            (Query(by_process(f"rate(process_cpu_seconds_total[{RATE}])"), "{{name}}"),),
            "Cores by process.",
        ),
        Panel(
            "Memory",
            "bytes",
            (Query(by_process("process_resident_memory_bytes"), "{{name}}"),),
            "Resident, by process; of segments that are shared, what the process has touched.",
        ),
    ),
)

OVERVIEW = Dashboard(
    "dualpath-overview",
    "DualPath / Overview",
    "What clients see, what waits where, how much storage helps, how even the load is.",
    (NOW, CLIENTS, QUEUES, CACHE, PROCESSES),
)
