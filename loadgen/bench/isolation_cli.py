"""`loadgen bench isolation`."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from common.config import QosConfig
from common.isolation.latency import Latency
from common.perf.units import parse_rate
from common.results import check_result_file
from loadgen.bench.isolation import SHAPE, Phase, measure
from loadgen.bench.isolation_result import result_of
from loadgen.conduct import errors, stdout_console
from loadgen.experiments.options import Out, positive
from loadgen.experiments.setting import versions
from loadgen.report.text import write_result


def isolation(
    rate: Annotated[str, typer.Option(metavar="RATE", help="Of every compute NIC, each way")] = "20MB/s",
    rounds: Annotated[int, typer.Option(min=1, help="Each has every phase once, in another order")] = 5,
    seconds: Annotated[float, typer.Option(callback=positive, help="Of small messages in a phase")] = 2.5,
    flows: Annotated[int, typer.Option(min=1, help="Connections with KV from each node that sends any")] = 2,
    out: Out = None,
) -> None:
    """A small message of the high class: idle, under KV without classes, and with classes at both ends; also where KV
    comes from other nodes (incast). On network namespaces; needs root."""
    console = stdout_console()

    def tell(number: int, phase: Phase, latency: Latency) -> None:
        print(f"round {number + 1} of {rounds}, {phase.name}: {latency}", file=sys.stderr, flush=True)

    with errors():
        check_result_file(out)
        bytes_per_s = int(parse_rate("--rate", rate))
        measured = asyncio.run(measure(bytes_per_s, rounds, seconds, flows, tell))
        settings: dict[str, Any] = {
            "rate_bytes_per_s": bytes_per_s,
            "seconds": seconds,
            "flows": flows,
            "network": f"{SHAPE[0]}P{SHAPE[1]}D of namespaces, NICs shaped by the kernel at both ends; tcp transport; "
            "CPUs kept awake, small messages do not wait for one, bulk gives way",
            "qos": QosConfig().model_dump(),
            "versions": versions(),
        }
        result = result_of(measured, settings)
        console.print(_table(result))
        for name, flag in result["validity"].items():
            console.print(f"{name}: {'holds' if flag['ok'] else 'does not hold'}: {flag['detail']}", highlight=False)
        if out is not None:
            write_result(result, out)


def _table(result: dict[str, Any]) -> Table:
    table = Table(title="Small messages of the high class, medians of rounds", title_justify="left")
    for name in ("phase", "n", "p50 us", "p99 us", "p50 / idle", "p99 / idle"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for name, latency in result["isolation"].items():
        ratios = [result["ratios"].get(f"{name}_over_idle_{p}") for p in ("p50", "p99")]
        cells = [f"{latency['n']:,}", f"{latency['p50_us']:,.0f}", f"{latency['p99_us']:,.0f}"]
        table.add_row(name.replace("_", " "), *cells, *("" if value is None else f"{value:.2f}" for value in ratios))
    return table
