"""`lmworks doctor --probe`: measurements that confirm or exclude what files alone leave open.

Each probe yields measurements under the code of the cause that they decide. One outside of its healthy range supports the cause, one inside
excludes it.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from lmworks.checkpoint import listing
from lmworks.checkpoint.tensor_files import Reader, split_rows
from lmworks.doctor.recompute import ROWS, Recomputation
from lmworks.errors import UserError
from lmworks.io.run_layout import BASE
from lmworks.run.replay import bad_batches, load_bad
from lmworks.watch.batch_growth import timeline_of
from lmworks.watch.evidence import Evidence
from lmworks.watch.probes import Probed, ProbeRecord
from lmworks.watch.rule import Measurement
from lmworks.watch.run_files import open_run
from lmworks.weights.run_models import folder

_SAMPLED = 1 << 22  # elements of the weights, and of the optimizer's state, that are compared
_BEGIN = 24  # tokens of a document that are compared: some 100 characters, more than most headers
_MOST_SEQUENCES = 1 << 14
_FEWEST = 8  # documents that begin in the sequences
_LEARNED = 40  # tokens per entry of the vocabulary, after which a model knows more than their frequencies (measured: make doctor)
_HERE = "recomputed"


def probe(run: Recomputation, began: Callable[[str], None] = lambda title: None) -> ProbeRecord:
    """Run all probes; what they measured, and by title why a probe could not run. `began` is called with the title of each."""
    found: list[Probed] = []
    lacking: dict[str, str] = {}
    times = [event.get("time") for event in Evidence(open_run(run.run_dir), run.stage).events]
    seen = next((float(time) for time in reversed(times) if isinstance(time, int | float)), None)
    for title, one in PROBES.items():
        began(title)
        try:
            found += one(run)
        except (UserError, ValueError, LookupError, RuntimeError) as error:  # the last: out of memory, a damaged tensor
            lacking[title] = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return ProbeRecord(run.stage.stage, run.step, run.checkpoint.name, round(time.time(), 3), found, lacking, seen)


def _not_finite(run: Recomputation) -> Iterator[Probed]:
    """The step that was not finite, in its precision and in fp32, and another batch with the same weights."""
    kept = bad_batches(run.run_dir, run.stage.model)
    step = max(kept) if kept else max(run.step - 1, 0)
    batch = load_bad(kept[step], step, run.recipe) if kept else run.batch(step, ROWS)
    other = run.batch(max(step - 1, 0), ROWS)
    finite = {}
    finite["own"], first = _finite(run.repeat(step, batch))
    finite["other"], _ = _finite(run.repeat(step, other))
    finite["fp32"] = finite["own"] or _finite(run.repeat(step, batch, "fp32"))[0]
    verdict = {
        "fp16-overflow": not finite["own"] and finite["fp32"],
        "bad-batch": not finite["own"] and not finite["fp32"] and finite["other"],
        "operator-overflow": not finite["own"] and not finite["fp32"] and not finite["other"],
    }
    said = {
        "fp16-overflow": f"step {step}: not finite in {run.recipe.train.precision}, and finite in fp32",
        "bad-batch": f"step {step}: not finite in fp32 either, while the batch before is finite with the same weights",
        "operator-overflow": f"step {step}: not finite in fp32 either, nor is another batch",
    }
    for code, holds in verdict.items():
        yield Probed(code, Measurement(said[code], float(holds), high=0, source=_HERE), exact=True, where=first or "")


def _finite(result: tuple[float, float, str | None]) -> tuple[bool, str | None]:
    loss, norm, first = result
    return math.isfinite(loss) and math.isfinite(norm), first


def _same_bits(run: Recomputation) -> Iterator[Probed]:
    """The same step twice, with the same weights and the same batch."""
    step = max(run.step - 1, 0)
    batch = run.batch(step, ROWS)
    (loss, norm, _), (again, norm_again, _) = (run.repeat(step, batch) for _ in range(2))
    apart = max(abs(loss - again) / max(abs(loss), 1e-30), abs(norm - norm_again) / max(abs(norm), 1e-30))
    # Kernels of GPUs may add up gradients in another order each time.
    limit = 0.0 if run.model(step)[1].device.type == "cpu" else 1e-3
    name = "relative difference of loss and gradient norm between two computations of the same step"
    yield Probed("silent-corruption", Measurement(name, apart, high=limit, source=_HERE), exact=True)


def _sources(run: Recomputation) -> Iterator[Probed]:
    """The loss of each source relative to the entropy of its token frequencies: a model that has learned nothing but these has 1."""
    _only_pretraining(run, "the labels of conversations repeat, and no healthy range of their loss was measured")
    trained = timeline_of(run.recipe, run.run_dir).tokens_before(run.step)
    if trained < _LEARNED * int(run.recipe.model.vocab_size or 0):
        raise UserError(f"{trained:,} tokens are too few to tell what the model has learned")
    losses: dict[str, list[float]] = defaultdict(list)
    tokens: dict[str, Counter[int]] = defaultdict(Counter)
    for source, row in run.sampled_rows(run.trained_steps(64), 4 * ROWS):
        losses[source].append(float(run.row_losses(row)[0]))
        tokens[source].update(row.labels[row.labels >= 0].tolist())
    ratios = {name: float(np.nanmean(values)) / max(_entropy(tokens[name]), 1e-9) for name, values in losses.items() if len(values) >= 4}
    if not ratios:
        return
    lowest = min(ratios.values())
    worst = max(ratios, key=lambda name: ratios[name])
    name = "lowest loss of a source relative to the entropy of its token frequencies"
    yield Probed("wrong-tokenizer", Measurement(name, lowest, high=0.97, source=_HERE))
    if len(ratios) > 1:
        others = float(np.median([value for key, value in ratios.items() if key != worst]))
        name = f"loss of source {worst} relative to the entropy of its token frequencies, over that of the others"
        yield Probed("noisy-source", Measurement(name, ratios[worst] / max(others, 1e-9), high=1.3, source=_HERE), where=f"source {worst}")


def _entropy(counts: Counter[int]) -> float:
    """In nats, with the correction of Miller and Madow for a sample."""
    values = np.array(list(counts.values()), np.float64)
    total = values.sum()
    share = values / max(total, 1)
    return float(-(share * np.log(share)).sum() + (len(values) - 1) / (2 * max(total, 1)))


def _gap(run: Recomputation) -> Iterator[Probed]:
    """Text that the stage has read against text of the same kind that it has not read."""
    unseen, seen = (
        np.array([float(run.row_losses(row)[0]) for _, row in rows])
        for rows in (run.unread_rows(2 * ROWS), run.sampled_rows(run.trained_steps(64), 2 * ROWS))
    )  # fmt: skip
    error = math.sqrt(np.nanvar(seen) / max(len(seen), 1) + np.nanvar(unseen) / max(len(unseen), 1))
    gap = float(np.nanmean(unseen) - np.nanmean(seen))
    limit = max(3 * error, 0.02 * float(np.nanmean(seen)))
    name = "loss of text that was not read, minus that of text that was read"
    yield Probed("overfitting", Measurement(name, gap, high=limit, source=f"{_HERE}; 3 standard errors", unit="nats"))


def _optimizer_state(run: Recomputation) -> Iterator[Probed]:
    """The share of the optimizer's state that is zero."""
    path = listing.directories(folder(run.run_dir, run.stage.model))[-1]
    zeros = total = 0
    reader = Reader(path)
    for name, record in reader.table.items():
        if not name.startswith("optimizer/") or not record.shape or total >= _SAMPLED:
            continue
        offsets, sizes = split_rows(record)[0]
        part = reader.read_slice(name, offsets, sizes)
        zeros, total = zeros + int((part == 0).sum()), total + part.numel()
    if not total:
        raise UserError(f"{path} has no optimizer state")
    measured = Measurement("share of the optimizer's state that is zero", zeros / total, high=0.5, source=_HERE)
    yield Probed("optimizer-state-lost", measured)


def _unchanged(run: Recomputation) -> Iterator[Probed]:
    """The share of weights that are equal in the two newest checkpoints, without embeddings of tokens and experts: those that the steps did
    not use are equal in any precision, and tuning uses few."""
    paths = listing.directories(folder(run.run_dir, run.stage.model))[-2:]
    if len(paths) < 2:
        raise UserError("there is one checkpoint only")
    before, after = (Reader(path) for path in paths)
    equal = total = 0
    for name, record in after.table.items():
        if not name.startswith("model/") or len(record.shape) < 2 or name not in before.table or total >= _SAMPLED:
            continue
        if name.startswith("model/embedding.") or ".experts." in name:
            continue
        offsets, sizes = split_rows(record)[0]
        one, other = (reader.read_slice(name, offsets, sizes) for reader in (before, after))
        equal, total = equal + int((one == other).sum()), total + one.numel()
    apart = listing.step_of(paths[1]) - listing.step_of(paths[0])
    if not total:
        raise UserError("the two newest checkpoints have no matrices in common")
    name = f"share of weights that are equal after {apart:,} steps"
    yield Probed("low-precision-weights", Measurement(name, equal / total, high=0.2, source=_HERE))


def _order(run: Recomputation) -> Iterator[Probed]:
    """Documents that begin with the same tokens, and sequences that follow each other as they do in their source."""
    _only_pretraining(run, "conversations begin alike, and their rows are drawn from all of them")
    begins: dict[bytes, set[str]] = defaultdict(set)
    last: dict[str, int] = {}
    follows = sequences = 0
    for step in reversed(run.trained_steps(256)):
        batch = run.batch(step)
        for row, found in zip(batch.tokens, run.documents(step), strict=True):
            if found.epoch:
                continue
            sequences += 1
            follows += last.get(found.source, -2) + 1 == found.sequence
            last[found.source] = found.sequence
            place = 0
            for span in found.documents:
                if span.start == 0 and place + _BEGIN <= min(place + span.stop, len(row)):
                    begins[row[place : place + _BEGIN].tobytes()].add(span.id)
                place += span.stop - span.start
        if sequences > _MOST_SEQUENCES:
            break
    documents = sum(map(len, begins.values()))
    if documents >= _FEWEST:
        name = f"share of documents whose first {_BEGIN} tokens are those of another"
        yield Probed("duplicated-data", Measurement(name, 1 - len(begins) / documents, high=0.1, source=_HERE))
    name = "share of sequences that follow the one before them in their source"
    yield Probed("unshuffled-data", Measurement(name, follows / max(sequences, 1), high=0.1, source=_HERE))


def _only_pretraining(run: Recomputation, reason: str) -> None:
    if run.stage is not BASE:
        raise UserError(f"of pretraining only: {reason}")


PROBES: Mapping[str, Callable[[Recomputation], Iterator[Probed]]] = {
    "order of the data": _order,
    "optimizer state": _optimizer_state,
    "two checkpoints": _unchanged,
    "a step twice": _same_bits,
    "loss by source": _sources,
    "read and unread text": _gap,
    "a bad step in fp32": _not_finite,
}

