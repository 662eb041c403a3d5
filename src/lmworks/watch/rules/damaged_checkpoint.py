"""A checkpoint is damaged: refused by its hash, or of other sizes than its manifest says."""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Finding, Measurement, Rule
from lmworks.watch.run_files import Json, read_document

_HASH = "BLAKE3 and size of every file in the manifest"
_MOST = 100_000  # files whose size is compared


def _check(evidence: Evidence) -> Finding | None:
    refused = evidence.of("checkpoint_refused")
    sizes = list(_wrong_sizes(evidence))
    if not refused and not sizes:
        return None
    places = [f"{event.get('path')}: {event.get('reason')}" for event in refused] + sizes
    resumed = evidence.resumes
    return Finding(
        [
            Measurement("checkpoints that were refused", len(refused), high=0, source=_HASH),
            Measurement("files of another size than their manifest says", len(sizes), high=0, source=_HASH),
        ],
        steps=(max(resumed), max(resumed)) if resumed else None,
        exact=True,
        where="; ".join(places)[:400],
        changes=[
            Change(
                advice="run the same command again: it resumes from the newest sound checkpoint", cost="the steps since that checkpoint"
            ),
            Change(
                "checkpoints.keep_last",
                str(max(3, int(evidence.value("checkpoints.keep_last", 2)))),
                "keep more of them",
                cost="the room of another checkpoint",
            ),
            Change(advice=f"if it happens again, test the disk, and the memory of the machine: lmworks ckpt verify {evidence.files.label}"),
        ],
        check_afterwards="lmworks ckpt verify finds no damaged checkpoint, and the ledger has no new checkpoint_refused",
    )


def _wrong_sizes(evidence: Evidence) -> Iterator[str]:
    """The files of the stage's checkpoints that have not the size of their manifest."""
    prefix = "checkpoints/" if evidence.stage == "pretrain" else f"{evidence.stage}/checkpoints/"
    for name in evidence.files.names()[:_MOST]:
        folder, _, last = name.rpartition("/")
        if last == "manifest.json" and folder.startswith(f"{prefix}step-") and "." not in folder.removeprefix(prefix):
            files = read_document(evidence.files, name).get("files")
            for file, entry in files.items() if isinstance(files, dict) else ():
                yield from _difference(evidence, f"{folder}/{file}", entry)


def _difference(evidence: Evidence, name: str, entry: Json) -> Iterator[str]:
    wanted = entry.get("bytes") if isinstance(entry, dict) else None
    found = evidence.files.size_in_run(name)
    if isinstance(wanted, int) and found != wanted:
        yield f"{name} has {found:,} bytes instead of {wanted:,}" if found >= 0 else f"{name} is missing"


RULE = Rule(
    "damaged-checkpoint",
    "A checkpoint is damaged and cannot be used.",
    "checkpoints",
    ("checkpoints", "resume"),
    _check,
    "A checkpoint gets its name after all of its bytes are written, synced and read back, so a crash leaves none that is half written. "
    "Damage comes later: a disk, a copy that was cut, a program that wrote into the folder. A resume verifies every byte, sets a damaged "
    "checkpoint aside and takes the one before it; nothing is trained from damaged weights.",
    look_alikes={"optimizer-state-lost": "the checkpoint is sound, and its moments are zero"},
)
