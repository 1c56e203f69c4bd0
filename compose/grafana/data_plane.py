"""The dashboard for who looks into the data plane: NICs and traffic classes, hops, buffers, storage, event loops."""

from __future__ import annotations

from common.watchdog import LIMIT_S
from compose.grafana.dashboard import RATE, Dashboard, Panel, Query, Row, by_process

LOOP = "dualpath_event_loop_callback_cpu_seconds_bucket"


def _nic(kind: str) -> tuple[Query, ...]:
    matched = f'dualpath_nic_bytes_total{{nic=~".+/{kind}"}}'
    return (Query(f"sum by (nic, direction) (rate({matched}[{RATE}]))", "{{nic}} {{direction}}"),)


NETWORK = Row(
    "Network",
    (
        Panel("Storage NICs", "Bps", _nic("snic"), "By node and direction; whoever writes counts both ends.", width=12),
        Panel(
            "Compute NICs", "Bps", _nic("cnic"), "By engine and direction; whoever writes counts both ends.", width=12
        ),
        Panel(
            "By traffic class",
            "Bps",
            (
                Query(
                    f'sum by (traffic_class, intent) (rate(dualpath_nic_bytes_total{{direction="rx"}}[{RATE}]))',
                    "{{traffic_class}}: {{intent}}",
                ),
            ),
            "What arrives through NICs, by the class that the network tells apart and by what it is for.",
            stacked=True,
        ),
        Panel(
            "By transport",
            "Bps",
            (Query(f"sum by (transport) (rate(dualpath_transport_bytes_total[{RATE}]))", "{{transport}}"),),
            "verbs: RDMA; tcp: between hosts without it; shm: within a host; local: within a process's own regions.",
            stacked=True,
        ),
        Panel(
            "Bytes of transfers under way",
            "bytes",
            (Query("sum by (traffic_class) (dualpath_transport_queued_bytes)", "{{traffic_class}}"),),
            "Begun and not ended, over all NICs, by class.",
            stacked=True,
        ),
        Panel(
            "Waiting for paced NICs",
            "bytes",
            (Query("sum by (nic, direction) (dualpath_nic_queued_bytes)", "{{nic}} {{direction}}"),),
            "Only where network.snic_rate or cnic_rate paces NICs in user space.",
        ),
        Panel(
            "Transfers that failed",
            "ops",
            (
                Query(
                    f"sum by (intent, transport) (rate(dualpath_transport_failures_total[{RATE}]))",
                    "{{intent}} by {{transport}}",
                ),
                Query(f"sum by (reason) (rate(dualpath_transport_refused_total[{RATE}]))", "refused: {{reason}}"),
            ),
            "Failed or cancelled, one whose client gives up among them; and frames and connections that data sockets "
            "refused: anything steady of these is a peer, or a stranger, that should not be there.",
        ),
        Panel(
            "RDMA: writes a doorbell",
            "short",
            (
                Query(
                    f"sum by (traffic_class) (rate(dualpath_rdma_writes_total[{RATE}]))"
                    f" / sum by (traffic_class) (rate(dualpath_rdma_doorbells_total[{RATE}]))",
                    "{{traffic_class}}",
                ),
            ),
            "How many work requests are posted at once; only with network.transport verbs.",
        ),
    ),
)

HOPS = Row(
    "KV bytes",
    (
        Panel(
            "By hop",
            "Bps",
            (Query(f"sum by (hop) (rate(dualpath_kv_bytes_total[{RATE}]))", "{{hop}}"),),
            "load: PE buffer to PE device; push: DE buffer to PE device; handoff: PE device to DE buffer; keep: PE "
            "device to PE buffer; h2d, d2h: between DE buffer and DE device.",
            stacked=True,
        ),
        Panel(
            "Read from storage, by engine",
            "Bps",
            (Query(by_process(f"rate(dualpath_storage_read_bytes_total[{RATE}])"), "{{name}}"),),
            "Into the buffer of each engine's node.",
        ),
        Panel(
            "Kept in storage, by engine",
            "Bps",
            (Query(by_process(f"rate(dualpath_storage_write_bytes_total[{RATE}])"), "{{name}}"),),
            "Blocks that the engine's node has persisted.",
        ),
    ),
)

MEMORY = Row(
    "Memory",
    (
        Panel(
            "Buffers in use",
            "percentunit",
            (Query(by_process("(1 - dualpath_buffer_slots_free / dualpath_buffer_slots)"), "{{name}}"),),
            "Share of the staging slots of each engine's node that are taken.",
            width=6,
            top=1,
        ),
        Panel(
            "Pages in use",
            "percentunit",
            (Query(by_process("(1 - dualpath_pages_free / dualpath_pages)"), "{{name}}"),),
            "Share of the device memory of each decode engine that has KV. At 1 requests are preempted.",
            width=6,
            top=1,
        ),
        Panel(
            "Most device memory ever in use",
            "percentunit",
            (Query(by_process("(dualpath_device_memory_peak_bytes / dualpath_device_memory_bytes)"), "{{name}}"),),
            'Of the KV memory ("HBM") of each engine, since its start. Layerwise prefill needs a few layers only.',
            width=6,
            top=1,
        ),
        Panel(
            "Preemptions",
            "ops",
            (Query(by_process(f"rate(dualpath_preemptions_total[{RATE}])"), "{{name}}"),),
            "Running requests that were put back for lack of pages: enlarge decode.device_memory.",
            width=6,
        ),
    ),
)

STORAGE = Row(
    "Storage",
    (
        Panel(
            "Block store",
            "Bps",
            (
                Query(f"sum(rate(dualpath_block_store_read_bytes_total[{RATE}]))", "read"),
                Query(f"sum(rate(dualpath_block_store_written_bytes_total[{RATE}]))", "written"),
            ),
            "Payload bytes, over all gateways.",
        ),
        Panel(
            "Blocks",
            "ops",
            (
                Query(f"sum(rate(dualpath_storage_blocks_read_total[{RATE}]))", "read"),
                Query(f"sum(rate(dualpath_storage_blocks_written_total[{RATE}]))", "stored"),
                Query(f"sum(rate(dualpath_storage_misses_total[{RATE}]))", "asked for and not there"),
            ),
            "A second, over all gateways.",
        ),
        Panel(
            "Blocks on their way in",
            "short",
            (Query(by_process("dualpath_storage_blocks_in_flight"), "{{name}}"),),
            "Announced and not stored yet, by gateway.",
        ),
        Panel(
            "What goes wrong with blocks",
            "ops",
            (
                Query(f"sum by (error) (rate(dualpath_storage_failed_puts_total[{RATE}]))", "not stored: {{error}}"),
                Query(
                    f"sum by (reason) (rate(dualpath_storage_blocks_quarantined_total[{RATE}]))", "damaged: {{reason}}"
                ),
                Query(f"sum(rate(dualpath_storage_refused_puts_total[{RATE}]))", "arrived damaged"),
                Query(
                    f"sum by (operation) (rate(dualpath_storage_failures_total[{RATE}]))",
                    "{{operation}} failed, as engines see it",
                ),
            ),
            "Nothing of it reaches clients: such blocks are recomputed, or not kept.",
        ),
        Panel(
            "Free places in the gateways' memory",
            "short",
            (Query(by_process("dualpath_storage_staging_slots_free"), "{{name}}"),),
            "Blocks; at 0 reads and stores wait for one another: enlarge storage.staging.",
        ),
        Panel(
            "Blocks in DRAM tiers",
            "short",
            (Query(by_process("dualpath_tier_blocks"), "{{name}}"),),
            "Only where storage.tier gives prefill nodes one.",
        ),
    ),
)

LOOPS = Row(
    "Event loops and messages",
    (
        Panel(
            f"Callbacks over {LIMIT_S * 1e3:g} ms",
            "ops",
            (
                Query(
                    by_process(
                        f'(rate({LOOP}{{le="+Inf"}}[{RATE}]) - ignoring (le) rate({LOOP}{{le="{LIMIT_S}"}}[{RATE}]))'
                    ),
                    "{{name}}",
                ),
            ),
            "In CPU time: whatever else the loop serves waits for them. The process's log names them.",
        ),
        Panel(
            "Lag",
            "s",
            (Query(by_process("dualpath_event_loop_lag_seconds"), "{{name}}"),),
            "How late the loop woke up for its last heartbeat: its callbacks, or other processes on its cores.",
        ),
        Panel(
            "Messages dropped or late",
            "ops",
            (
                Query(f"sum by (reason) (rate(dualpath_messages_dropped_total[{RATE}]))", "dropped: {{reason}}"),
                Query(f"sum by (role) (rate(dualpath_messages_late_total[{RATE}]))", "late, at {{role}}"),
                Query(f"sum by (type) (rate(dualpath_stale_messages_total[{RATE}]))", "stale, at front ends: {{type}}"),
            ),
            "Late and stale ones belong to attempts that have ended; some come with every client that gives up.",
        ),
    ),
)

DATA_PLANE = Dashboard(
    "dualpath-data-plane",
    "DualPath / Data plane",
    "Where KV bytes are and go: NICs and traffic classes, hops, buffers, storage; and the loops that move them.",
    (NETWORK, HOPS, MEMORY, STORAGE, LOOPS),
)
