"""The passes of a corpus job, in order. Everything else that needs their names takes them from here."""

from __future__ import annotations

from collections.abc import Sequence

from lmworks.corpus.engine.dedup_decisions import resolve_duplicates_inputs
from lmworks.corpus.engine.job import Job, Piece
from lmworks.corpus.engine.passes import decontamination, duplicates, reading, repeated_ngrams, resolving, writing
from lmworks.corpus.engine.passes.repeated_ngrams import pieces_if_cutting, reduction_if_cutting
from lmworks.corpus.engine.task import Pass, pieces, reduction


def _reduction_if_limited(job: Job) -> Sequence[str]:
    return reduction(job) if reading.limited_pieces(job) else ()


def _reduction_if_decontaminating(job: Job) -> Sequence[str]:
    return reduction(job) if decontamination.enabled(job) else ()


def _pieces_if_decontaminating(job: Job) -> Sequence[Piece]:
    return job.pieces if decontamination.enabled(job) else ()


# fmt: off
PASSES = (
    Pass("size", "size sources", reading.limited_pieces, reading.size_inputs, reading.measure_sizes),
    Pass("draw", "draw", _reduction_if_limited, reading.draw_inputs, reading.draw_documents),
    Pass("read", "read and filter", pieces, reading.read_inputs, reading.read_part),
    Pass("exact_duplicates", "exact duplicates", reduction, resolve_duplicates_inputs, duplicates.find_exact_duplicates),
    Pass(
        "near_duplicates", "near-duplicates", duplicates.band_tasks,
        duplicates.near_duplicates_inputs, duplicates.find_near_duplicates,
    ),
    Pass("resolve_duplicates", "deduplicate", reduction, resolve_duplicates_inputs, resolving.resolve_duplicates),
    Pass("ngram_anchors", "find passages", pieces_if_cutting, repeated_ngrams.anchors_inputs, repeated_ngrams.find_anchors),
    Pass(
        "shared_anchors", "compare passages", reduction_if_cutting,
        repeated_ngrams.shared_anchors_inputs, repeated_ngrams.find_shared_anchors,
    ),
    Pass(
        "candidate_ngrams", "find repeated passages", pieces_if_cutting,
        repeated_ngrams.candidates_inputs, repeated_ngrams.find_candidates,
    ),
    Pass(
        "repeated_ngrams", "compare repeated passages", reduction_if_cutting,
        repeated_ngrams.repeated_ngrams_inputs, repeated_ngrams.find_repeated_ngrams,
    ),
    Pass(
        "cut_passages", "cut repeated passages", pieces_if_cutting,
        repeated_ngrams.cut_passages_inputs, repeated_ngrams.cut_passages,
    ),
    Pass(
        "collect_protected", "protect held-out text", _reduction_if_decontaminating,
        decontamination.collect_protected_inputs, decontamination.collect_protected,
    ),
    Pass(
        "scan_contamination", "decontaminate", _pieces_if_decontaminating,
        decontamination.scan_contamination_inputs, decontamination.scan_contamination,
    ),
    Pass(
        "common_ngrams", "find boilerplate", _reduction_if_decontaminating,
        decontamination.common_ngrams_inputs, decontamination.count_common_ngrams,
    ),
    Pass("write", "write corpus", pieces, writing.write_inputs, writing.write_part),
)
# fmt: on
