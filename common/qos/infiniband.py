"""InfiniBand: virtual lanes, as options of the subnet manager opensm. Pure.

A port serves two tables. The high one holds every lane but KV's; after high_limit * 4 KiB of it one packet may go from
the low table, which holds all lanes, by weight. So what KV keeps beside saturated collectives is its part of the low
table of one packet in so many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.config import QosConfig
from common.qos.lanes import NUM_LANES, SERVICE_LEVELS, UNMARKED_LANE, Lane, lane_of, lanes
from common.transport.classes import COLLECTIVE, KV

LIMIT_UNIT_BYTES = 4096
#: The largest packet: what KV keeps is counted with it.
PACKET_BYTES = 4096


def low_share(qos: QosConfig, busy_others: int) -> float:
    """The part of a link that KV gets while so many other lanes have more to send than fits."""
    turn = qos.low_weight / (qos.low_weight + busy_others * qos.high_weight)
    between = max(qos.high_limit * LIMIT_UNIT_BYTES, PACKET_BYTES)  # a limit of 0 is one packet
    return turn * PACKET_BYTES / (between + PACKET_BYTES)


def opensm(qos: QosConfig) -> list[str]:
    """Lines of opensm.conf."""
    all_lanes = lanes()
    return [
        "# Virtual lanes for dualpath: append to opensm.conf of every subnet manager, then restart it (or SIGHUP).",
        "# opensm writes them to all ports: hosts, switches and routers alike, so that incast is covered too.",
        *(f"# VL {lane.number}: {lane.purpose}{', yields to all others' if lane.low else ''}" for lane in all_lanes),
        "qos TRUE",
        "",
        "# Ports have to have so many data lanes: opensm takes what the least of them has (`ibportstate`: OperVLs).",
        f"qos_max_vls {NUM_LANES}",
        "",
        f"# After {qos.high_limit} * 4 KiB from the high table one packet of the low table goes, so KV never starves;",
        "# at 255 the low table would have no turn while the high one has anything to send.",
        f"qos_high_limit {qos.high_limit}",
        "",
        "# lane:weight, weights in 64 bytes. Weight 0 in the high table: KV is served from the low table only.",
        f"qos_vlarb_high {_table(all_lanes, qos.high_weight, 0)}",
        f"qos_vlarb_low {_table(all_lanes, qos.high_weight, qos.low_weight)}",
        f"# Of a link full of collectives KV keeps {low_share(qos, 1):.2%}, with all lanes full "
        f"{low_share(qos, NUM_LANES - 1):.2%}; of an idle one it gets all.",
        "",
        f"# The lane of each service level: collectives ride SL {COLLECTIVE.service_level}, KV SL {KV.service_level}; "
        "levels without a lane of their own yield.",
        f"qos_sl2vl {','.join(str(lane_of(level)) for level in SERVICE_LEVELS)}",
        "",
        f"# Model collectives choose their level themselves: NCCL_IB_SL={COLLECTIVE.service_level}.",
        "# What asks for a path (IPoIB, mounts of storage) is kept out of their lane by a policy, qos_policy_file:",
        "#   qos-ulps",
        f"#       default : {UNMARKED_LANE}",
        "#   end-qos-ulps",
        "# What ports have then: `smpquery vlarb LID PORT`, `smpquery sl2vl LID PORT`.",
    ]


def _table(all_lanes: Sequence[Lane], high: int, low: int) -> str:
    return ",".join(f"{lane.number}:{low if lane.low else high}" for lane in all_lanes)
