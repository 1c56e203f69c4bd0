"""The oracle: plain transformers in one process, with its own attention and cache, never this project's.

Checking a transcript does not repeat the generation. A greedy run picks y[k] = argmax f(prompt, y[0..k-1]). In a causal
model the logits at a position depend on the tokens up to it only, so one forward over prompt + output yields all of
f(prompt), f(prompt, y[0]), ... at once. If every argmax equals the token that was generated there, then by induction
over k the output is the one a greedy run gives; if not, the first difference is where the two part, and what follows it
says nothing. A sequence that is a prefix of another one needs no forward of its own: that is nearly every turn of an
agent's session, and a repetition of the same session by another system.

Both runs round, in different orders. gap (expected's logit minus got's) tells a near-tie, some 1e-5, from wrong KV.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from common.types import pack_tokens

_transformers: Any = transformers  # much of it has no annotations, or wrong ones
#: Rows of logits that exist at once: a row is the vocabulary's size in float32.
LOGIT_ROWS = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """One generated turn of a transcript. session and turn only name it."""

    session: str
    turn: int
    prompt: list[int]
    output: list[int]

    @property
    def context(self) -> list[int]:
        """What the model read to generate the output: all but the last token."""
        return (self.prompt + self.output)[:-1]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first token of a turn that a greedy run would not have given. index counts output tokens."""

    session: str
    turn: int
    index: int
    expected: int
    got: int
    gap: float


@dataclass(frozen=True, slots=True)
class Report:
    """Turns checked, turns equal to the oracle, and the others."""

    turns: int
    equal: int
    mismatches: list[Mismatch]


@dataclass(frozen=True, slots=True)
class Forward:
    """One teacher-forced run over tokens; the context of each of its turns is a prefix of them."""

    tokens: list[int]
    turns: list[Turn]


class Reference:
    """A model directory as transformers runs it."""

    def __init__(self, directory: Path, dtype: str = "float32", device: str = "cpu", threads: int = 0) -> None:
        if threads:
            torch.set_num_threads(threads)
        self._device = torch.device(device)
        _transformers.logging.disable_progress_bar()
        model = _transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), local_files_only=True
        )
        self._model = model.to(self._device).eval()
        # generate() merges the checkpoint's own settings (penalties, sampling) in: the oracle is plain greedy
        self._model.generation_config = _transformers.GenerationConfig()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_new_tokens: int, eos_ids: Iterable[int] = ()) -> list[int]:
        """What model.generate gives on the whole prompt: max_new_tokens, or fewer that end with one of eos_ids."""
        tokens = self._batch(prompt)
        output = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(eos_ids) or None,
            pad_token_id=0,
        )
        generated: list[int] = output[0, len(prompt) :].tolist()
        return generated

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), vocab] float32: the logits after each token."""
        return self._head(self._hidden(tokens))

    def check(self, forward: Forward) -> list[Mismatch]:
        """The turns of one forward whose output is not what a greedy run gives."""
        hidden = self._hidden(forward.tokens)
        mismatches = (self._first_mismatch(hidden, turn) for turn in forward.turns)
        return [mismatch for mismatch in mismatches if mismatch is not None]

    def _first_mismatch(self, hidden: Tensor, turn: Turn) -> Mismatch | None:
        first = len(turn.prompt) - 1
        got = torch.tensor(turn.output, device=self._device)
        for start in range(0, len(got), LOGIT_ROWS):
            stop = min(start + LOGIT_ROWS, len(got))
            logits = self._head(hidden[first + start : first + stop])
            expected = logits.argmax(dim=-1)
            if (wrong := (expected != got[start:stop]).nonzero()).numel():
                row = int(wrong[0])
                ours, theirs = int(got[start + row]), int(expected[row])
                gap = float(logits[row, theirs] - logits[row, ours])
                return Mismatch(turn.session, turn.turn, start + row, theirs, ours, gap)
        return None

    @torch.inference_mode()
    def _hidden(self, tokens: Sequence[int]) -> Tensor:
        hidden: Tensor = self._model.get_decoder()(self._batch(tokens), use_cache=False).last_hidden_state
        return hidden[0]

    @torch.inference_mode()
    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits.float()

    def _batch(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self._device)


def plan_forwards(turns: Iterable[Turn]) -> list[Forward]:
    """The fewest forwards whose tokens have every turn's context as a prefix."""
    forwards: list[Forward] = []
    packed: list[bytes] = []
    for turn in sorted(turns, key=lambda turn: len(turn.context), reverse=True):
        context = pack_tokens(turn.context)
        home = next((i for i, tokens in enumerate(packed) if tokens.startswith(context)), None)
        if home is None:
            forwards.append(Forward(turn.context, [turn]))
            packed.append(context)
        else:
            forwards[home].turns.append(turn)
    return forwards


def check_transcript(
    directory: Path,
    transcript: Path,
    dtype: str = "float32",
    device: str = "cpu",
    threads: int = 0,
    progress: Callable[[dict[str, int]], None] = lambda line: None,
) -> Report:
    """Check every turn of a JSON-lines transcript ({"session", "turn", "prompt": [ids], "output": [ids]} a line).

    ValueError, naming the line, for a line that is not such a turn.
    """
    turns = read_transcript(transcript)
    forwards = plan_forwards(turns)
    reference = Reference(directory, dtype, device, threads)
    mismatches: list[Mismatch] = []
    for done, forward in enumerate(forwards, 1):
        mismatches += reference.check(forward)
        counts = {"tokens": len(forward.tokens), "turns": len(forward.turns), "mismatches": len(mismatches)}
        progress({"forward": done, "forwards": len(forwards), **counts})
    return Report(len(turns), len(turns) - len(mismatches), mismatches)


def read_transcript(path: Path) -> list[Turn]:
    """The turns of a transcript. ValueError for a line that is not a turn."""
    turns = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                turn = Turn(str(row["session"]), int(row["turn"]), list(row["prompt"]), list(row["output"]))
                pack_tokens(turn.prompt + turn.output)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise ValueError(f"{path}, line {number}: not a turn ({error!r})") from None
            if not turn.prompt or not turn.output:
                raise ValueError(f"{path}, line {number}: a turn needs a prompt and an output")
            turns.append(turn)
    return turns


def main() -> None:
    """Print the report as one line of JSON. Exit status 0 if the check ran, whatever it found."""
    parser = argparse.ArgumentParser(prog="python -m services.engine.torch_backend.reference", description=main.__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    parser.add_argument("--transcript", type=Path, required=True, help="JSON lines: session, turn, prompt, output")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves its choice")
    parser.add_argument("--progress", choices=["none", "json"], default="none", help="one line a forward on stderr")
    options = parser.parse_args()

    def print_progress(line: dict[str, int]) -> None:
        if options.progress == "json":
            print(json.dumps(line), file=sys.stderr, flush=True)

    try:
        report = check_transcript(
            options.model, options.transcript, options.dtype, options.device, options.threads, print_progress
        )
    except (OSError, ValueError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print(json.dumps(asdict(report)), flush=True)


if __name__ == "__main__":
    main()
