"""The load generators that people have, unchanged, against a small cluster of this project: each in an environment of
its own, which is made on first use.

    python -m tests.smoke_load_tools aiperf            # or guidellm, inference-perf, or several
    python -m tests.smoke_load_tools inference-perf --python python3.12 --environments ~/tools

A tool passes if it ends with status 0 and every request that it made ended well here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.log import setup_logging
from services.frontend.service import Frontend
from tests.cluster import cluster_config, run_cluster
from tests.models import tiny_model

REQUESTS = 6
MODEL_NAME = "tiny"


@dataclass(frozen=True, slots=True)
class Tool:
    """packages: what pip installs. command(url, model directory, working directory): its arguments."""

    packages: tuple[str, ...]
    command: Callable[[str, Path, Path], list[str]]


def _aiperf(url: str, model: Path, work: Path) -> list[str]:
    rows = [{"timestamp": 500 * i, "input_length": 150, "output_length": 8, "hash_ids": [i]} for i in range(REQUESTS)]
    trace = work / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(model), "--ui", "none"]
    replay = ["--input-file", str(trace), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"]
    out = ["--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(work / "aiperf")]
    return ["aiperf", "profile", "-m", MODEL_NAME, "--url", url, *options, *replay, *out]


def _guidellm(url: str, model: Path, work: Path) -> list[str]:
    data = json.dumps({"kind": "synthetic_text", "prompt_tokens": 100, "output_tokens": 8})
    limits = ["--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    backend = ["--backend", f"kind=openai_http,target={url},model={MODEL_NAME}"]
    return ["guidellm", "run", *backend, "--data", data, "--tokenizer", f"kind=huggingface_auto,model={model}", *limits]


def _inference_perf(url: str, model: Path, work: Path) -> list[str]:
    prompts = {"min": 80, "max": 120, "mean": 100, "std_dev": 10, "total_count": REQUESTS}
    outputs = {"min": 4, "max": 8, "mean": 6, "std_dev": 1, "total_count": REQUESTS}
    config = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", "input_distribution": prompts, "output_distribution": outputs},
        "load": {"type": "constant", "stages": [{"rate": 2, "duration": REQUESTS // 2}], "num_workers": 1},
        "server": {"type": "vllm", "model_name": MODEL_NAME, "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(model)},
        "storage": {"local_storage": {"path": str(work / "inference-perf")}},
    }
    file = work / "inference-perf.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    return ["inference-perf", "-c", str(file)]


TOOLS = {
    "aiperf": Tool(("aiperf==0.13.0",), _aiperf),
    "guidellm": Tool(("torch==2.13.0", "guidellm==0.8.0"), _guidellm),
    "inference-perf": Tool(("inference-perf==0.7.0",), _inference_perf),
}


def environment_of(name: str, directory: Path, python: str) -> Path:
    """The tool's own environment, made if it is not there."""
    environment = directory / name
    if not (environment / "bin" / name).exists():
        subprocess.run([python, "-m", "venv", str(environment)], check=True)
        subprocess.run([str(environment / "bin" / "pip"), "install", "-q", *TOOLS[name].packages], check=True)
    return environment


async def smoke(name: str, environment: Path, work: Path, timeout_s: float) -> bool:
    """Run one tool against a cluster of its own."""
    model = tiny_model(work, max_position_embeddings=4096)
    config = cluster_config(model, work / "blocks", model__name=MODEL_NAME)
    async with run_cluster(config, driver=False) as cluster:
        frontend = Frontend(cluster.config, "frontend")
        try:
            await frontend.start()
            command, *arguments = TOOLS[name].command(frontend.url, model, work)
            path = {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
            environ = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHON"))}
            child = await asyncio.create_subprocess_exec(
                str(environment / "bin" / command), *arguments, cwd=work, env={**environ, **path}
            )
            async with asyncio.timeout(timeout_s):
                status = await child.wait()
            counts = frontend.metrics.snapshot()
        finally:
            await frontend.stop(drain=False)
    ended = {key: int(value) for key, value in counts.items() if key.startswith("requests_total{")}
    good = sum(count for key, count in ended.items() if "length" in key or "stop" in key)
    print(f"{name}: status {status}; requests here: {ended}", flush=True)
    return status == 0 and good >= REQUESTS and good == sum(ended.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="+", choices=sorted(TOOLS))
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache" / "dualpath" / "tools")
    parser.add_argument("--python", default=sys.executable, help="that the environments are made with")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a tool has")
    options = parser.parse_args()
    setup_logging("warning")
    failed = []
    for name in options.tools:
        environment = environment_of(name, options.environments, options.python)
        with tempfile.TemporaryDirectory() as work:
            if not asyncio.run(smoke(name, environment, Path(work), options.timeout)):
                failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
