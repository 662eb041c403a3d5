"""Every declared mutant can still be planted: `make mutants` plants them and has the fast tests find them."""

from __future__ import annotations

import ast

from mutants.mutant import ROOT, declared
from mutants.sampled import TARGETS


def test_every_mutant_can_be_planted() -> None:
    mutants = declared()
    assert len(mutants) >= 200
    assert len({mutant.promise for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        assert mutant.promise.endswith(".") and mutant.old != mutant.new, mutant
        for path, _, test in (one.partition("::") for one in mutant.test_paths):
            assert (ROOT / path).exists(), mutant
            assert not test or f"\ndef {test.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), mutant
        ast.parse(mutant.mutated())


def test_what_mutants_are_drawn_from_is_there() -> None:
    for target in TARGETS.values():
        assert all(list((ROOT / "src" / "lmworks").glob(pattern)) for pattern in target.modules.split()), target.modules
        assert all((ROOT / test).exists() for test in target.tests), target.tests
