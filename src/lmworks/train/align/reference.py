"""Reference scores: what the weights that a stage starts from give each answer, computed once and kept in the stage's folder.

    DIR/reference/manifest.json   what the scores depend on, and how many there are
    DIR/reference/00000.npy       summed log-probabilities of the first `PART` answers (float64), and so on

Each file is written atomically; a killed computation resumes after its last whole file. No second model is ever in memory.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lmworks import progress
from lmworks.checkpoint.communicator import Communicator
from lmworks.errors import UserError
from lmworks.files import read_json, write_bytes, write_json
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.train.align.answers import Answer, pack

PART = 512


def reference_scores(
    model: ParallelModel, answers: Sequence[Answer], folder: Path, key: str, communicator: Communicator, *,
    length: int, micro_batch_size: int,
) -> torch.Tensor:  # fmt: skip
    """The summed log-probability of each answer (n,) in float64, on all ranks, which call it together.

    `key` identifies the answers, the weights and the precision: scores that are kept under another key are computed again.
    """
    manifest = {"key": key, "answers": len(answers), "part": PART}
    parts = [answers[start : start + PART] for start in range(0, len(answers), PART)]
    kept = communicator.broadcast(_read(folder, manifest, len(parts)) if communicator.is_first else [])
    found, was_training = list(kept), model.training
    model.eval()
    try:
        with progress.bar("reference scores", len(answers), sum(map(len, found))) as bar:
            for number in range(len(found), len(parts)):
                packed = pack(parts[number], length, number)
                scores = -packed.sums(model.token_cross_entropy(packed.batch, micro_batch_size).double())
                found.append(scores.numpy())
                if communicator.is_first:
                    stream = io.BytesIO()
                    np.save(stream, found[-1])
                    write_bytes(folder / f"{number:05}.npy", stream.getvalue())
                bar.advance(len(parts[number]))
    finally:
        model.train(was_training)
    return torch.from_numpy(np.concatenate(found)) if found else torch.empty(0, dtype=torch.float64)


def _read(folder: Path, manifest: dict[str, object], count: int) -> list[np.ndarray]:
    """The whole files that a run with the same manifest has kept; the folder is made anew for another one."""
    try:
        same = read_json(folder / "manifest.json") == manifest
    except UserError:
        same = False
    if not same:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(folder / "manifest.json", manifest)
    found = []
    for number in range(count):
        try:
            found.append(np.load(folder / f"{number:05}.npy", allow_pickle=False))
        except (OSError, ValueError, EOFError):
            break
    return found
