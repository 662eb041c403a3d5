"""The stages of a corpus job, in order."""

from __future__ import annotations

from collections.abc import Sequence

from lmworks.corpus.engine import dedup_decisions
from lmworks.corpus.engine.job import Job, Piece
from lmworks.corpus.engine.passes import decontamination, duplicates, reading, repeated_ngrams, resolving, writing
from lmworks.corpus.engine.task import Stage, pieces, reduction


def _if_limited(job: Job) -> Sequence[str]:
    return reduction(job) if reading.limited(job) else ()


def _if_gated(job: Job) -> Sequence[str]:
    return reduction(job) if decontamination.on(job) else ()


def _gated_pieces(job: Job) -> Sequence[Piece]:
    return job.pieces if decontamination.on(job) else ()


STAGES = (
    Stage("size", "size sources", reading.limited, reading.size_inputs, reading.size),
    Stage("draw", "draw", _if_limited, reading.draw_inputs, reading.draw),
    Stage("read", "read and filter", pieces, reading.read_inputs, reading.read_part),
    Stage("same", "exact duplicates", reduction, dedup_decisions.decide_inputs, duplicates.same),
    Stage("meet", "near-duplicates", duplicates.meetings, duplicates.meet_inputs, duplicates.meet),
    Stage("decide", "deduplicate", reduction, dedup_decisions.decide_inputs, resolving.decide),
    Stage("anchors", "find passages", repeated_ngrams.cut_pieces, repeated_ngrams.anchor_inputs, repeated_ngrams.anchor),
    Stage("twice", "compare passages", repeated_ngrams.once, repeated_ngrams.common_inputs, repeated_ngrams.common),
    Stage("runs", "find repeated passages", repeated_ngrams.cut_pieces, repeated_ngrams.run_inputs, repeated_ngrams.run),
    Stage("again", "compare repeated passages", repeated_ngrams.once, repeated_ngrams.again_inputs, repeated_ngrams.again),
    Stage("cut", "cut repeated passages", repeated_ngrams.cut_pieces, repeated_ngrams.cut_inputs, repeated_ngrams.cut_part),
    Stage("protect", "protect held-out text", _if_gated, decontamination.protect_inputs, decontamination.protect),
    Stage("scan", "decontaminate", _gated_pieces, decontamination.scan_inputs, decontamination.scan),
    Stage("common", "find boilerplate", _if_gated, decontamination.common_inputs, decontamination.common),
    Stage("write", "write corpus", pieces, writing.write_inputs, writing.write_part),
)
