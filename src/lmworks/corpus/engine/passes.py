"""The passes of a corpus job, in order. All other code takes their names from here."""

from __future__ import annotations

from lmworks.corpus.engine import decontamination_pass, duplicates_pass, ngrams_pass, reading_pass, writing_pass
from lmworks.corpus.engine.dedup_decisions import cuts_passages, resolve_duplicates_inputs
from lmworks.corpus.engine.job import Pass, only_if, pieces, reduction

_LIMITED = only_if(reading_pass.limited_pieces, reduction)
_CUTTING, _CUTTING_ONCE = only_if(cuts_passages, pieces), only_if(cuts_passages, reduction)
_DECONTAMINATING, _DECONTAMINATING_ONCE = only_if(decontamination_pass.enabled, pieces), only_if(decontamination_pass.enabled, reduction)

# fmt: off
PASSES = (
    Pass("size", "size sources", reading_pass.limited_pieces, reading_pass.size_inputs, reading_pass.measure_sizes),
    Pass("draw", "draw", _LIMITED, reading_pass.draw_inputs, reading_pass.draw_documents),
    Pass("read", "read and filter", pieces, reading_pass.read_inputs, reading_pass.read_part),
    Pass("exact_duplicates", "exact duplicates", reduction, resolve_duplicates_inputs, duplicates_pass.find_exact_duplicates),
    Pass(
        "near_duplicates", "near-duplicates", duplicates_pass.band_tasks,
        duplicates_pass.near_duplicates_inputs, duplicates_pass.find_near_duplicates,
    ),
    Pass("resolve_duplicates", "deduplicate", reduction, resolve_duplicates_inputs, duplicates_pass.resolve_duplicates),
    Pass("ngram_anchors", "find passages", _CUTTING, ngrams_pass.anchors_inputs, ngrams_pass.find_anchors),
    Pass(
        "shared_anchors", "compare passages", _CUTTING_ONCE,
        ngrams_pass.shared_anchors_inputs, ngrams_pass.find_shared_anchors,
    ),
    Pass(
        "candidate_ngrams", "find repeated passages", _CUTTING,
        ngrams_pass.candidates_inputs, ngrams_pass.find_candidates,
    ),
    Pass(
        "repeated_ngrams", "compare repeated passages", _CUTTING_ONCE,
        ngrams_pass.repeated_ngrams_inputs, ngrams_pass.find_repeated_ngrams,
    ),
    Pass(
        "cut_passages", "cut repeated passages", _CUTTING,
        ngrams_pass.cut_passages_inputs, ngrams_pass.cut_passages,
    ),
    Pass(
        "collect_protected", "protect held-out text", _DECONTAMINATING_ONCE,
        decontamination_pass.collect_protected_inputs, decontamination_pass.collect_protected,
    ),
    Pass(
        "scan_contamination", "decontaminate", _DECONTAMINATING,
        decontamination_pass.scan_contamination_inputs, decontamination_pass.scan_contamination,
    ),
    Pass(
        "common_ngrams", "find boilerplate", _DECONTAMINATING_ONCE,
        decontamination_pass.common_ngrams_inputs, decontamination_pass.count_common_ngrams,
    ),
    Pass("write", "write corpus", pieces, writing_pass.write_inputs, writing_pass.write_part),
)
# fmt: on
