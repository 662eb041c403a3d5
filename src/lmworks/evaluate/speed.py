"""How fast a model generates: prefill, decoding, time to the first token and peak memory, by batch and prompt length.

What is timed is `lmworks.inference.generate`, with random prompts of equal length and greedy choice, without a tokenizer or a server.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lmworks.errors import UserError
from lmworks.inference.generate import GenerateOptions, stream
from lmworks.inference.model import for_inference
from lmworks.ui.terminal import bar

if TYPE_CHECKING:
    from rich.table import Table

    from lmworks.model import Transformer

BATCHES, PROMPT_LENGTHS, NEW_TOKENS, SECONDS = (1, 8), (128, 512), 32, 60.0
_MOST_REPEATS = 20
HOW = (
    "lmworks.inference.generate with random prompts of equal length, greedy, without stop tokens; one warm-up per row of the table, "
    "then as many repeats as the time allows, at most 20; median, and least to greatest of the repeats; time to first token: from the "
    "call to the first token of the whole batch; prefill: prompt tokens of the batch over that time; decode: all later tokens of the "
    "batch over theirs"
)


@dataclass(frozen=True)
class Spread:
    """Median of some repeats, and their least and greatest."""

    median: float
    least: float
    greatest: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One batch size and prompt length. Speeds in tokens/s of the whole batch, time in seconds, memory in bytes."""

    batch: int
    prompt: int
    repeats: int
    prefill: Spread
    decode: Spread | None
    first_token: Spread
    peak_memory: int | None


@dataclass
class Speed:
    """All measurements of a model. `skipped` names what was not measured, and why."""

    device: str
    dtype: str
    weights: str
    new_tokens: int
    memory: str
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"how": HOW}


def measure_speed(
    model: Transformer, batches: Sequence[int] = BATCHES, prompt_lengths: Sequence[int] = PROMPT_LENGTHS, new_tokens: int = NEW_TOKENS,
    seconds: float = SECONDS,
) -> Speed:  # fmt: skip
    """Measure every combination within about `seconds` in all: a combination that would not fit is skipped, and so is one that is longer
    than the model's context or needs more memory than there is. Raises `UserError` for numbers below 1, and for fewer than 2 new tokens."""
    if min(*batches, *prompt_lengths, 1) < 1 or new_tokens < 2 or seconds <= 0:
        raise UserError("batch sizes, prompt lengths and the time are numbers from 1, and there are at least 2 new tokens")
    device = model.embedding.weight.device
    model = for_inference(model)
    memory = _Memory(device)
    dtype, weights = (str(kind).removeprefix("torch.") for kind in (model.compute_dtype, model.embedding.weight.dtype))
    found = Speed(_device_name(device), dtype, weights, new_tokens, memory.what)
    combinations = sorted({(batch, length) for batch in batches for length in prompt_lengths}, key=lambda one: (one[0] * one[1], one))
    end, rate = time.monotonic() + seconds, 0.0  # rate: seconds per prompt token of the combination before
    with bar("generation speed", len(combinations)) as progress:
        for number, (batch, length) in enumerate(combinations):
            progress.note(f"batch {batch}, prompt of {length}")
            now = time.monotonic()
            reason = _too_long(model, length + new_tokens)
            if not reason and now + 2 * rate * batch * length > end:
                reason = f"the time of {seconds:g} s is used up"
            if not reason:
                try:
                    share = now + (end - now) / (len(combinations) - number)
                    row = _measure(model, batch, length, new_tokens, min(end, share), memory)
                    found.rows.append(row)
                    rate = row.first_token.median / (batch * length)
                except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in str(error):
                        raise
                    reason = "out of memory"
            if reason:
                found.skipped.append({"batch": batch, "prompt": length, "reason": reason})
            progress.advance()
    if not found.rows:
        raise UserError(f"no speed was measured: {found.skipped[0]['reason']}; give smaller sizes or more time")
    return found


def speed_table(name: str, found: Speed) -> Table:
    """The measurements as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    title = f"{name} on {found.device}: activations in {found.dtype}, weights in {found.weights}, {found.new_tokens} new tokens"
    table = Table(title=Text(title))
    speeds = ("prefill, tokens/s", "decode, tokens/s", "time to first token, ms")
    for heading in ("batch", "prompt", *speeds, f"peak memory, MiB {found.memory}", "repeats"):
        table.add_column(heading, justify="right")
    for row in found.rows:
        decode = _spread(row.decode) if row.decode else "not measured"
        memory = f"{row.peak_memory / 2**20:,.0f}" if row.peak_memory is not None else "not known"
        first = _spread(row.first_token, 1000)
        table.add_row(str(row.batch), str(row.prompt), _spread(row.prefill), decode, first, memory, str(row.repeats))
    skipped = "; ".join(f"batch {one['batch']}, prompt {one['prompt']}: {one['reason']}" for one in found.skipped)
    table.caption = Text("median [least to greatest of the repeats]" + (f"; not measured: {skipped}" if skipped else ""))
    return table


def _spread(one: Spread, scale: float = 1.0) -> str:
    def text(value: float) -> str:
        return f"{scale * value:,.0f}" if scale * value >= 100 else f"{scale * value:.3g}"

    return f"{text(one.median)} [{text(one.least)} to {text(one.greatest)}]"


def _measure(model: Transformer, batch: int, length: int, new_tokens: int, end: float, memory: _Memory) -> Row:
    draws = torch.Generator().manual_seed(batch * 1_000_003 + length)
    assert model.config.vocab_size
    prompts = torch.randint(model.config.vocab_size, (batch, length), generator=draws).tolist()
    _once(model, prompts, 2, end)
    memory.reset()
    first: list[float] = []
    decode: list[float] = []
    while not first or (time.monotonic() < end and len(first) < _MOST_REPEATS):
        begun, later, tokens = _once(model, prompts, new_tokens, end)
        first.append(begun)
        if tokens:
            decode.append(batch * tokens / later)
    prefill = Spread.of([batch * length / one for one in first])
    return Row(batch, length, len(first), prefill, Spread.of(decode) if decode else None, Spread.of(first), memory.peak())


def _once(model: Transformer, prompts: list[list[int]], new_tokens: int, end: float) -> tuple[float, float, int]:
    """Seconds to the first token, seconds of the later ones, and how many these were; they stop early at `end`."""
    start = time.perf_counter()
    steps = stream(model, prompts, GenerateOptions(max_new_tokens=new_tokens))
    next(steps)
    begun = last = time.perf_counter()  # a step has its tokens as numbers of Python, so the device has finished it
    tokens = 0
    while tokens < new_tokens - 1 and time.monotonic() <= end and next(steps, None):
        last = time.perf_counter()
        tokens += 1
    return begun - start, last - begun, tokens


def _too_long(model: Transformer, tokens: int) -> str:
    limit = model.config.max_position_embeddings
    return f"with its new tokens longer than the context of {int(limit)}" if limit and tokens > int(limit) else ""


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)" if device.type == "cpu" else device.type


class _Memory:
    """Peak memory since `reset`: allocated on a GPU, or resident of this process, of which Linux keeps a peak that can be reset."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.what = "allocated on the GPU" if device.type == "cuda" else "resident in this process"
        self._can_reset = False

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
                self._can_reset = True
            except OSError:  # not Linux
                self._can_reset = False

    def peak(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if not self._can_reset:
            return None
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
