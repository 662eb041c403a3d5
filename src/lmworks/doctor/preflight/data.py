"""Checks that token files are undamaged, that their lineage is complete, and that they match tokenizer and model."""

from __future__ import annotations

import random

from lmworks.checkpoint import listing
from lmworks.doctor.preflight.check_result import CheckContext, CheckResult, MissingInput
from lmworks.files import sha256_file
from lmworks.plan.amounts import size
from lmworks.shards.format.indexed import with_ending
from lmworks.shards.format.lineage import ENDING, open_lineage
from lmworks.shards.format.manifest import Manifest, Shard, check_vocabulary, verify
from lmworks.tokenizer import load as load_tokenizer

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
