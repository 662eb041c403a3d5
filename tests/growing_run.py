"""The tiny run with a batch that grows twice in its first phase, as the loss falls."""

from __future__ import annotations

from lmworks.watch.ledger import GREW, read_ledger
from tiny_run import Tiny

RAMP = "{kind: loss, start_tokens: 64 tokens, sizes: [128 tokens, 256 tokens], losses: [6.0, 5.6], window_steps: 3}"
SCHEDULE = "{warmup: 10%, decay: 20%}"
GROWING = (
    f"train.phases.general.batch_ramp={RAMP}", f"train.phases.general.lr_schedule={SCHEDULE}", "train.phases.long.tokens=1024 tokens",
    "train.save_every=4 steps", "checkpoints.keep_last=99", "train.sample_every=100%", "train.validate_every=25%",
)  # fmt: skip


def grown(run: Tiny) -> list[tuple[int, int]]:
    """The growths in the ledger: pairs (step, tokens per step)."""
    return [(line["step"], line["tokens_per_step"]) for line in read_ledger(run.run_dir / "ledger.jsonl") if line["event"] == GREW]
