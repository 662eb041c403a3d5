"""The stages of a corpus job, in order."""

from __future__ import annotations

from collections.abc import Sequence

from lmworks.corpus.engine import copies, deciding, fates, gate, passages, reading, writing
from lmworks.corpus.engine.job import Job, Piece
from lmworks.corpus.engine.task import Stage, pieces, reduction


def _if_limited(job: Job) -> Sequence[str]:
    return reduction(job) if reading.limited(job) else ()


def _if_gated(job: Job) -> Sequence[str]:
    return reduction(job) if gate.on(job) else ()


def _gated_pieces(job: Job) -> Sequence[Piece]:
    return job.pieces if gate.on(job) else ()


STAGES = (
    Stage("size", "size sources", reading.limited, reading.size_inputs, reading.size),
    Stage("draw", "draw", _if_limited, reading.draw_inputs, reading.draw),
    Stage("read", "read and filter", pieces, reading.read_inputs, reading.read_part),
    Stage("same", "exact duplicates", reduction, fates.decide_inputs, copies.same),
    Stage("meet", "near-duplicates", copies.meetings, copies.meet_inputs, copies.meet),
    Stage("decide", "deduplicate", reduction, fates.decide_inputs, deciding.decide),
    Stage("anchors", "find passages", passages.cut_pieces, passages.anchor_inputs, passages.anchor),
    Stage("twice", "compare passages", passages.once, passages.common_inputs, passages.common),
    Stage("runs", "find repeated passages", passages.cut_pieces, passages.run_inputs, passages.run),
    Stage("again", "compare repeated passages", passages.once, passages.again_inputs, passages.again),
    Stage("cut", "cut repeated passages", passages.cut_pieces, passages.cut_inputs, passages.cut_part),
    Stage("protect", "protect held-out text", _if_gated, gate.protect_inputs, gate.protect),
    Stage("scan", "decontaminate", _gated_pieces, gate.scan_inputs, gate.scan),
    Stage("common", "find boilerplate", _if_gated, gate.common_inputs, gate.common),
    Stage("write", "write corpus", pieces, writing.write_inputs, writing.write_part),
)
