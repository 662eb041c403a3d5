"""A run with QK-clip from the command line: scores stay near the threshold, and a stopped run ends with the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cli.command import Lmworks
from tiny_run import BRIEF, Tiny, before_each_step, checkpoint, curve, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
THRESHOLD = 0.03
CHANGES = (*BRIEF, "model.use_qk_norm=false", f"optimizer.qk_clip_threshold={THRESHOLD}", "optimizer.ema_decay=0.5",
           "metrics.detail_every=4 steps")  # fmt: skip


def test_a_run(tiny_copy: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    other = tiny_copy.copy(tmp_path / "stopped")
    lmworks = Lmworks(monkeypatch, capfd)

    def train(tiny: Tiny) -> int:
        changes = [word for change in (f"run_dir={tiny.run_dir}", *CHANGES) for word in ("--set", change)]
        return lmworks("pretrain", tiny.recipe, *changes).code

    assert train(tiny_copy) == 0
    lines = curve(tiny_copy.run_dir)
    first, later = lines[0], lines[1:]
    assert first["attention/logit_max"] > 1.4 * THRESHOLD and first["attention/clipped_heads"] > 0
    assert all(line["attention/logit_max"] < 1.4 * THRESHOLD for line in later)  # it would not fall by itself: without, it rises
    heads = {name: value for name, value in lines[3].items() if name.count("/") == 3 and name.startswith("attention/logit_max/")}
    assert len(heads) == 2 * 2 and max(heads.values()) == pytest.approx(lines[3]["attention/logit_max"], abs=1e-6)

    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 3 else None)
        assert train(other) != 0
    assert train(other) == 0
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(other.run_dir)) == []
    of_heads = [name for line in lines for name in line if name.count("/") == 3]  # in lines with details, also after a resume
    assert [_without(line, of_heads) for line in curve(other.run_dir)] == [_without(line, of_heads) for line in lines]


def _without(line: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in names}
