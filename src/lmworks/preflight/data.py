"""Checks of the data: token files are undamaged, their lineage is complete, and they match tokenizer and model; and checks of their order.

Sequences are shuffled, and each is read once per epoch. In a published failure (SmolLM3 report), documents were shuffled but their
sequences were read consecutively, so that whole batches came from one long file and the loss was noisy.
"""

from __future__ import annotations

import random

import numpy as np

from lmworks.checkpoint import listing
from lmworks.io.files import sha256_file
from lmworks.preflight.check_result import CheckContext, CheckResult, MissingInput
from lmworks.shards.indexed import with_ending
from lmworks.shards.lineage import ENDING, open_lineage
from lmworks.shards.manifest import Manifest, Shard, check_vocabulary, verify
from lmworks.shards.order import Order
from lmworks.tokenizer import load as load_tokenizer
from lmworks.ui.amounts import size

_HASHED = 4 << 30  # bytes; of more data only a sample of the shards is hashed
_PROBE = "Hello, world! 123 + 456 = 579.\n\tnaïve café 你好 👩‍👧"


def hashes(context: CheckContext) -> CheckResult:
    """Verify the hash of every file (a sample if there is much data), one lineage row per document, and that the data of a run that has
    begun has not changed."""
    context.need_shards()
    manifest = Manifest.load(context.shards_dir)
    shards = list(manifest.shards())
    random.Random(context.recipe.seed).shuffle(shards)
    chosen: list[Shard] = []
    total = 0
    for shard in shards:
        if chosen and total + sum(shard.size.values()) > _HASHED:
            break
        chosen.append(shard)
        total += sum(shard.size.values())
    kept = {shard.prefix for shard in chosen}
    verify(context.shards_dir, _only(manifest, kept))
    for shard in chosen:
        path = with_ending(context.shards_dir / shard.prefix, ENDING)
        if path.exists() and (rows := open_lineage(path).metadata.num_rows) != shard.documents:
            return CheckResult("fail", f"{path} has {rows:,} documents, but the shard has {shard.documents:,}",
                           f"delete {path.parent} and run: lmworks shards build {context.name}")  # fmt: skip
    if (saved := listing.directories(context.run_dir / "checkpoints")) != []:
        before = listing.read_meta(saved[-1])["meta"].get("shards", {})
        digests = manifest.digests()
        changed = sorted(name for name, digest in before.items() if digests.get(name) != digest)
        if changed:
            return CheckResult("fail", f"the run began with different token files of {', '.join(changed)}",
                           "restore the old text and tokenizer, choose another run_dir, or continue with --allow shards")  # fmt: skip
    sampled = "" if len(chosen) == len(shards) else f" (a sample of {len(shards)})"
    text = f"{len(chosen)} shards, {size(total)}{sampled}: all hashes and lineage are correct"
    return CheckResult("ok", text, figures={"bytes": float(total)})


def _only(manifest: Manifest, prefixes: set[str]) -> Manifest:
    """The manifest with some of its shards."""
    sources = []
    for source in manifest.sources:
        splits = {
            name: split.model_copy(update={"shards": tuple(shard for shard in split.shards if shard.prefix in prefixes)})
            for name, split in (("train", source.train), ("validation", source.validation))
            if split is not None
        }
        sources.append(source.model_copy(update=splits))
    return manifest.model_copy(update={"sources": tuple(sources)})


def vocabulary(context: CheckContext) -> CheckResult:
    """Check that the tokenizer round-trips text, and that tokenizer, shards and model have the same vocabulary."""
    file = context.run_dir / "tokenizer" / "tokenizer.json"
    if not file.exists():
        raise MissingInput("there is no tokenizer yet", f"lmworks tokenizer train {context.name}, then this again")
    tokenizer = load_tokenizer(file.parent)
    rows = context.recipe.model.vocab_size
    assert rows
    if tokenizer.vocab_size > rows:
        return CheckResult("fail", f"the tokenizer has {tokenizer.vocab_size:,} entries, but the model has {rows:,} rows",
                       f"--set model.vocab_size={tokenizer.vocab_size}")  # fmt: skip
    if (back := tokenizer.decode(tokenizer.encode(_PROBE))) != _PROBE:
        return CheckResult("fail", f"the tokenizer turns {_PROBE!r} into {back!r}", f"delete {file.parent} and train it again")
    text = f"{tokenizer.vocab_size:,} entries, {rows:,} rows"
    if not (context.shards_dir / "manifest.json").exists():
        return CheckResult("ok", f"{text}; no token files to compare yet")
    check_vocabulary(Manifest.load(context.shards_dir), rows, sha256_file(file))
    return CheckResult("ok", f"{text}, and the token files were made with this tokenizer")


_SEQUENCES = 20_000  # checked per phase
_NEAR = 50  # two sequences are neighbors if their distance is at most 1/50 of the range
_TOO_OFTEN = 0.15  # fraction of neighbors above chance
_FEWEST = 16  # sequences; with fewer the comparison with chance is meaningless


def shuffled(context: CheckContext) -> CheckResult:
    """Check for every phase that consecutive sequences come from all parts of the text, and that none repeats within an epoch."""
    context.need_shards()
    order = context.batches.order
    looked, pairs = 0, 0
    worst = ("", 0.0, 0.0)
    for phase, steps in enumerate(order.timeline.phases):
        count = min(steps.sequences, _SEQUENCES)
        found = order.locate(phase, np.arange(count))
        looked += count
        for index in np.unique(found.source):
            mine = found.source == index
            name = order.sources[index]
            where = f"phase {steps.name}, source {name}"
            sequence, epoch = found.sequence[mine], found.epoch[mine]
            if problem := _repeated(order, phase, name, sequence, epoch):
                return CheckResult("fail", f"{where}: {problem}", "this is a bug in the data order; report it with resolved.json")
            by_chance, found_near, count = _neighbor_fraction(sequence, order.share(phase, name).sequences)
            pairs += count
            if found_near - by_chance > worst[1] - worst[2] or not worst[0]:
                worst = (where, found_near, by_chance)
    documents = {span.id for row in context.batches.documents(0) for span in row.documents}
    rows = context.batches.order.sequences(0)[1]
    figures = {"sequences": float(looked), "pairs": float(pairs), "documents_in_first_batch": float(len(documents)), "neighbours": worst[1]}
    text = f"{looked:,} sequences, each once an epoch; the first batch of {rows} draws on {len(documents):,} documents"
    if worst[1] - worst[2] > _TOO_OFTEN:
        return CheckResult(
            "fail", f"{worst[0]}: {worst[1]:.0%} of consecutive sequences are neighbors in the text, {worst[2]:.0%} by chance",
            "shuffle by sequence, not by document: otherwise a long file fills whole batches, and the loss is noisy", figures,
        )  # fmt: skip
    close = f"{worst[1]:.0%} of neighbors in a batch are close in the text, {worst[2]:.0%} by chance"
    return CheckResult("ok", f"{text}; {close}", figures=figures)


def _repeated(order: Order, phase: int, name: str, sequence: np.ndarray, epoch: np.ndarray) -> str | None:
    """A description of the error if a sequence repeats within an epoch or is out of range; otherwise None."""
    available = order.share(phase, name).sequences
    for number in np.unique(epoch):
        read = sequence[epoch == number]
        once = np.unique(read)
        if len(once) < len(read):
            return f"{len(read) - len(once):,} sequences repeat within epoch {number}"
        if len(once) > available or once[0] < 0 or once[-1] >= available:
            return f"sequences outside its range of {available:,} are read"
    return None


def _neighbor_fraction(sequence: np.ndarray, available: int) -> tuple[float, float, int]:
    """The fraction of consecutive sequences that are neighbors by chance, the measured fraction, and the number of pairs."""
    if available < _FEWEST or len(sequence) <= _FEWEST:
        return 0.0, 0.0, 0
    near = max(1, available // _NEAR)
    chance = 2 * near / available
    gaps = np.abs(np.diff(sequence))
    return chance, float((gaps <= near).mean()), len(gaps)
