"""The passes of a corpus job, in order. All other code takes their names from here."""

from __future__ import annotations

from lmworks.corpus.engine.dedup_decisions import cuts_passages, resolve_duplicates_inputs
from lmworks.corpus.engine.passes import decontamination, duplicates, reading, repeated_ngrams, resolving, writing
from lmworks.corpus.engine.task import Pass, only_if, pieces, reduction

_LIMITED = only_if(reading.limited_pieces, reduction)
_CUTTING, _CUTTING_ONCE = only_if(cuts_passages, pieces), only_if(cuts_passages, reduction)
_DECONTAMINATING, _DECONTAMINATING_ONCE = only_if(decontamination.enabled, pieces), only_if(decontamination.enabled, reduction)

# fmt: off
PASSES = (
    Pass("size", "size sources", reading.limited_pieces, reading.size_inputs, reading.measure_sizes),
    Pass("draw", "draw", _LIMITED, reading.draw_inputs, reading.draw_documents),
    Pass("read", "read and filter", pieces, reading.read_inputs, reading.read_part),
    Pass("exact_duplicates", "exact duplicates", reduction, resolve_duplicates_inputs, duplicates.find_exact_duplicates),
    Pass(
        "near_duplicates", "near-duplicates", duplicates.band_tasks,
        duplicates.near_duplicates_inputs, duplicates.find_near_duplicates,
    ),
    Pass("resolve_duplicates", "deduplicate", reduction, resolve_duplicates_inputs, resolving.resolve_duplicates),
    Pass("ngram_anchors", "find passages", _CUTTING, repeated_ngrams.anchors_inputs, repeated_ngrams.find_anchors),
    Pass(
        "shared_anchors", "compare passages", _CUTTING_ONCE,
        repeated_ngrams.shared_anchors_inputs, repeated_ngrams.find_shared_anchors,
    ),
    Pass(
        "candidate_ngrams", "find repeated passages", _CUTTING,
        repeated_ngrams.candidates_inputs, repeated_ngrams.find_candidates,
    ),
    Pass(
        "repeated_ngrams", "compare repeated passages", _CUTTING_ONCE,
        repeated_ngrams.repeated_ngrams_inputs, repeated_ngrams.find_repeated_ngrams,
    ),
    Pass(
        "cut_passages", "cut repeated passages", _CUTTING,
        repeated_ngrams.cut_passages_inputs, repeated_ngrams.cut_passages,
    ),
    Pass(
        "collect_protected", "protect held-out text", _DECONTAMINATING_ONCE,
        decontamination.collect_protected_inputs, decontamination.collect_protected,
    ),
    Pass(
        "scan_contamination", "decontaminate", _DECONTAMINATING,
        decontamination.scan_contamination_inputs, decontamination.scan_contamination,
    ),
    Pass(
        "common_ngrams", "find boilerplate", _DECONTAMINATING_ONCE,
        decontamination.common_ngrams_inputs, decontamination.count_common_ngrams,
    ),
    Pass("write", "write corpus", pieces, writing.write_inputs, writing.write_part),
)
# fmt: on
