"""RoCE: four lossless traffic classes by DSCP, as commands for one host's interface and a table for its switches. Pure.

Enhanced transmission selection counts whole percents, so KV keeps one percent at least.
"""

from __future__ import annotations

from common.config import QosConfig
from common.qos.lanes import NUM_LANES, PRIORITIES, Lane, lane_of, lanes
from common.transport.classes import COLLECTIVE


def percents(qos: QosConfig) -> list[int]:
    """Of a full link, lane by lane: KV's as network.qos has it, the rest in equal parts. They sum to 100."""
    low = max(1, round(100 * (1 - qos.high_share)))
    share, over = divmod(100 - low, NUM_LANES - 1)
    shares = []
    for lane in lanes():
        shares.append(low if lane.low else share + (over > 0))
        over -= not lane.low
    return shares


def roce(qos: QosConfig, device: str) -> list[str]:
    """A shell script: dcb (iproute2) where the driver has DCB, the same for mlnx_qos in comments."""
    shares = percents(qos)
    table = list(zip(lanes(), shares, strict=True))
    low = next(share for lane, share in table if lane.low)
    others = max(share for lane, share in table if not lane.low)
    tos = COLLECTIVE.dscp << 2
    priorities = [lane_of(priority) for priority in PRIORITIES]
    padding = [0] * (len(PRIORITIES) - NUM_LANES)
    lossless = [int(priority < NUM_LANES) for priority in PRIORITIES]
    codes = [(dscp, lane.number) for lane, _ in table for dscp in lane.dscps]
    dscps = " ".join(f"{dscp}:{number}" for dscp, number in codes)
    tools = " ".join(f"--dscp2prio set,{dscp},{number}" for dscp, number in codes)
    return [
        f"# Lossless traffic classes for dualpath on {device}: run as root on every host, and give every switch port",
        "# on the way the same table, or incast queues in the switch without classes.",
        "#   class  DSCP  share of a full link  PFC   what rides it",
        *(_row(lane, share) for lane, share in table),
        f"# Of a link full of collectives alone KV keeps {low}/{low + others}: ETS counts whole percents.",
        "",
        "# DSCP to priority, priority to traffic class (priorities without a class of their own yield like KV)",
        f"dcb app replace dev {device} dscp-prio {dscps}",
        f"dcb ets set dev {device} willing off prio-tc {_pairs(priorities)} "
        f"tc-tsa all:strict {_pairs(['ets'] * NUM_LANES)} tc-bw all:0 {_pairs(shares)}",
        "# Pause frames for each of the four, so that none drops and none stops another",
        f"dcb pfc set dev {device} prio-pfc all:off {_pairs(['on'] * NUM_LANES)}",
        "",
        "# The same with the tools of MLNX_OFED:",
        f"# mlnx_qos -i {device} --trust dscp {tools} --prio_tc {_list(priorities)} --pfc {_list(lossless)} \\",
        f"#     --tsa {_list(['ets'] * NUM_LANES + ['strict'] * len(padding))} --tcbw {_list([*shares, *padding])}",
        "",
        f"# dualpath marks its queue pairs itself; model collectives have to be told: NCCL_IB_TC={tos}.",
        f"# What the host has then: dcb app show dev {device}; dcb ets show dev {device}; dcb pfc show dev {device}",
    ]


def _row(lane: Lane, share: int) -> str:
    dscps = ", ".join(map(str, lane.dscps)) or "-"
    return f"#   {lane.number:<5}  {dscps:<4}  {share:>2} %                  on    {lane.purpose}"


def _pairs(values: list[int] | list[str]) -> str:
    return " ".join(f"{index}:{value}" for index, value in enumerate(values))


def _list(values: list[int] | list[str]) -> str:
    return ",".join(map(str, values))
