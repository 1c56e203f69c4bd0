"""Table 1: KV-cache to load for the computing that it saves, by model and context."""

from __future__ import annotations

from dataclasses import replace

from common.perf.models import DS_660B, QWEN_32B, GroupedQueryAttention, LatentAttention, ModelProfile
from loadgen.paper.exhibit import Exhibit, Line, Panel, Row

APPEND = 429
CONTEXTS = {"16k": 16 << 10, "64k": 64 << 10}
#: Of the paper's 64K set.
MEAN_CONTEXT = 32_721

#: Models of the table that no cluster here serves: only layers, attention and active parameters count. KV in FP8.
_GPT_OSS = replace(
    QWEN_32B,
    name="gpt-oss-120b",
    layers=18,  # every other one of 36 sees 128 tokens only: neither loads nor computes much
    attention=GroupedQueryAttention(heads=64, kv_heads=8, head_dim=64, element_bytes=1),
    active_params=5.1e9,
)
_QWEN3 = replace(
    QWEN_32B,
    name="qwen3-235b-a22b",
    layers=94,
    attention=GroupedQueryAttention(heads=64, kv_heads=4, head_dim=128, element_bytes=1),
    active_params=22e9,
)
_DS_V3 = replace(DS_660B, name="ds-v3", attention=LatentAttention(128, 512, 64, DS_660B.attention.row_bytes))
_DS_V32 = replace(DS_660B, name="ds-v3.2")
MODELS = (QWEN_32B, _GPT_OSS, _QWEN3, _DS_V32, _DS_V3)


def cache_to_compute(model: ModelProfile, context: int, append: int = APPEND) -> float:
    """GB of KV to load a PFLOP of prefill, for `append` tokens after `context` cached ones."""
    return model.kv_bytes_per_token * context / 1e9 / (model.flops(context, append) / 1e15)


def table1() -> Exhibit:
    rows, lines = [], []
    for model in MODELS:
        contexts = {**CONTEXTS, "32.7k": MEAN_CONTEXT} if model is _DS_V32 else CONTEXTS
        told = sorted((context, label) for label, context in contexts.items())
        values = [cache_to_compute(model, context) for context, _ in told]
        rows += [
            Row(f"cache_to_compute_{model.name}_{label}", f"{model.name} at {label} of context", "GB/PFLOP", value)
            for (_, label), value in zip(told, values, strict=True)
        ]
        lines.append(Line(model.name, [context for context, _ in told], values))
    notes = (
        "bytes a token and FLOPs follow from the models' shapes (common/perf/models.py): nothing is measured",
        "ds-v3: ours keeps scales and BF16 RoPE keys with its FP8 latents (656 bytes a layer), as ds-v3.2 does",
        "gpt-oss-120b: half of its layers see 128 tokens only and are left out",
    )
    panel = Panel("Table 1, append 429", "context (tokens)", "GB of KV a PFLOP", lines)
    return Exhibit("table1", "Cache-to-compute ratio", rows, (panel,), notes=notes)
