"""Runs inside each rank of the campaign, by way of PYTHONPATH: writes down every step, and plants what cannot be done from outside.

`LMWORKS_CHAOS` names a folder. `rank-N.jsonl` in it gets a line per step trained: its rows, hashed, and a checksum of this rank's weights
after it. `plant.json`, where it is there, is {"what": "poison" | "nan", "step", "rank", "pace", "point", "since"}: a batch whose loss is
not finite, a gradient with a NaN on one rank, seconds that every step takes longer, and where the first rank is killed, once: ["before
EVENT" or "after EVENT", N], the Nth time that it writes this event into the ledger, or does what a save does besides; with `since`, of
those that follow that event. The file `died` is there afterwards.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def _install(folder: str) -> None:
    import hashlib
    import json
    import time
    from dataclasses import replace
    from typing import Any

    import torch

    from lmworks.io import jsonl
    from lmworks.optim.groups import local
    from lmworks.parallel.parallel_model import ParallelModel
    from lmworks.train import trainer
    from lmworks.watch.monitors import checksums

    path, life = Path(folder), f"{os.getpid()}-{time.time():.3f}"
    plant = json.loads((path / "plant.json").read_text()) if (path / "plant.json").exists() else {}
    step_of, forward_backward = trainer.train_step, ParallelModel.forward_backward
    log = -1

    def digest(*arrays: Any) -> str:
        return hashlib.blake2b(b"".join(array.tobytes() for array in arrays), digest_size=8).hexdigest()

    def train_step(model: Any, optimizer: Any, batch: Any, **options: Any) -> Any:
        nonlocal log
        time.sleep(plant.get("pace", 0.0))
        result = step_of(model, optimizer, batch, **options)
        if log < 0:
            log = jsonl.open_append(path / f"rank-{model.ranks.global_rank}.jsonl")
        start, _ = model.rank_sequences(options["sequences"])
        weights = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        jsonl.append(log, {
            "life": life, "step": batch.step, "start": start, "ranks": model.ranks.world, "time": time.time(),
            "rows": [digest(*row) for row in zip(batch.tokens, batch.labels, strict=True)],
            "weights": hashlib.blake2b(repr(sorted(checksums(weights).items())).encode(), digest_size=8).hexdigest(),
        })  # fmt: skip
        return result

    def planted(self: ParallelModel, batch: Any, rows: int, micro_batch_size: int, scale: Any, *rest: Any) -> Any:
        here = batch.step == plant.get("step")
        if not here or plant["what"] == "nan":
            sums = forward_backward(self, batch, rows, micro_batch_size, scale, *rest)
            if here and self.ranks.global_rank == plant["rank"]:
                next(grad for p in self.parameters() if p.grad is not None and (grad := local(p.grad)).numel()).view(-1)[0] = float("nan")
            return sums
        sums = forward_backward(self, batch, rows, micro_batch_size, scale * float("nan"), *rest)
        return replace(sums, cross_entropy=sums.cross_entropy * float("nan"))

    trainer.train_step, ParallelModel.forward_backward = train_step, planted  # type: ignore[assignment, method-assign]
    if "point" in plant and os.environ.get("RANK", "0") == "0":
        point, times = plant["point"]
        _die_at(path / "died", point, times, plant["since"])


def _die_at(died: Path, point: str, times: int, since: str) -> None:
    """Kill this process at a point, unless it has been done before."""
    import signal
    from typing import Any

    from lmworks.checkpoint import checkpoints, publish, save
    from lmworks.train.trainer import Trainer
    from lmworks.watch.ledger import Ledger

    left, begun = times, not since or since in point or "bad_step" in point

    def come(to: str) -> None:
        nonlocal left, begun
        if to == point and begun and not died.exists():
            left -= 1
            if not left:
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        begun = begun or to == f"after {since}"

    def watched(call: Any, name: Any) -> Any:
        def acting(*given: Any, **options: Any) -> Any:
            what = name(*given)
            come(f"before {what}")
            result = call(*given, **options)
            come(f"after {what}")
            return result

        return acting

    Ledger.write = watched(Ledger.write, lambda ledger, event: event)  # type: ignore[method-assign]
    Trainer._flush = watched(Trainer._flush, lambda trainer: "flush")  # type: ignore[method-assign]
    save.publish = watched(save.publish, lambda aside, final: "publish")
    checkpoints.prune = watched(checkpoints.prune, lambda *given: "prune")
    publish.shutil.rmtree = watched(publish.shutil.rmtree, lambda path, *rest: "remove" if str(path).endswith(".gone") else "other")


# A rank, or a command that trains alone: not the launcher, nor torchrun's agent.
if "LMWORKS_CHAOS" in os.environ and ("RANK" in os.environ or sys.orig_argv[1:4] == ["-m", "lmworks.cli.main", "pretrain"]):
    _install(os.environ["LMWORKS_CHAOS"])
