"""Two corpora compared: everything that was done to one is found in the other, and the numbers add up on both sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import analysis_corpus as made
import pytest

from lmworks.corpus.analysis.diff import SourceDifference, diff, differs, number_repeats
from lmworks.corpus.analysis.prepared import PreparedCorpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    return made.make(tmp_path_factory.mktemp("evidence"))


def check_sums(found: Iterable[SourceDifference]) -> None:
    """The kept documents of every source add up: before = same + changed + moved + lost, after = same + changed + moved + gained."""
    for one in found:
        count = Counter[str]()
        for group in one.groups:
            count[group.kind] += group.documents
        assert one.before == one.same + count["changed"] + count["moved"] + count["lost"]
        assert one.after == one.same + count["changed"] + count["moved"] + count["gained"]


def kinds(found: list[SourceDifference], source: str = "pages") -> dict[tuple[str, str, str], int]:
    (one,) = [one for one in found if one.name == source]
    return {(group.kind, group.before, group.after): group.documents for group in one.groups}


def test_a_corpus_is_like_itself(corpus: PreparedCorpus) -> None:
    found = diff(corpus, corpus)
    assert not differs(found)
    assert sum(one.same for one in found) == len(made.kept(corpus)) + len(made.kept(corpus, "validation"))


def test_parts_of_another_size_change_nothing(tmp_path: Path) -> None:
    """But for the step that looks at earlier documents of the part, and who is held out, which goes by id."""
    plain = {"steps": [{"step": "clean"}, {"step": "rules"}], "validation_fraction": 0.0}
    one = made.make(tmp_path, **plain)
    many = PreparedCorpus(_prepare_again(tmp_path, part_bytes="20kB", **plain))
    assert len(many.pieces) > len(one.pieces)
    found = diff(one, many)
    check_sums(found)
    assert not differs(found)


def _prepare_again(folder: Path, name: str = "again", **corpus: object) -> Path:
    """Another corpus from the same files."""
    from lmworks.corpus import prepare
    from lmworks.corpus.contamination import Question

    prepare(made.recipe(folder / "rows.jsonl", **corpus), folder / name, [Question("riddles/0", made.QUESTION, "")], folder)
    return folder / name


def test_another_rule_tells_who_is_lost_and_who_gained(tmp_path: Path) -> None:
    pages = [made.source(tmp_path / "rows.jsonl")]
    one = made.make(tmp_path, sources=pages)
    steps = [{"step": "clean"}, {"step": "rules", "sets": ["fineweb"]}]
    other = PreparedCorpus(_prepare_again(tmp_path, sources=pages, steps=steps, dedup={"exact": False, "minhash": None}))
    found = diff(one, other)
    check_sums(found)
    met = kinds(found)
    assert any(kind == "gained" and before.startswith("dedup ") and after == "train" for kind, before, after in met)
    assert any(kind == "lost" and before == "train" and after.startswith("rules fineweb") for kind, before, after in met)
    assert any(kind == "dropped otherwise" and before == "rules mean_word_length" for kind, before, after in met)
    rows, later = made.decisions(one), made.decisions(other)
    for group in found[0].groups:
        for example in group.examples:
            if group.kind in ("lost", "gained", "dropped otherwise"):
                before, after = rows[example["before"]], later[example["after"]]
                assert (_fate(before), _fate(after)) == (group.before, group.after)


def _fate(row: dict[str, str]) -> str:
    return f"{row['fate']} {row['reason']}".strip()


ONLY_CLEAN = {"steps": [{"step": "clean"}], "validation_fraction": 0.0, "decontaminate": None, "dedup": {"minhash": None}}


def test_an_edited_an_added_and_a_removed_row(tmp_path: Path) -> None:
    pages = made.pages(20)
    one = made.make(tmp_path, pages, **ONLY_CLEAN, part_bytes="10MB")
    made.write(tmp_path / "rows.jsonl", [*pages[:3], pages[3] + " And one more word.", *pages[4:19]])
    found = diff(one, PreparedCorpus(_prepare_again(tmp_path, **ONLY_CLEAN, part_bytes="10MB")))
    check_sums(found)
    assert kinds(found) == {
        ("changed", "train/pages", "train/pages"): 1,
        ("lost", "train", "quarantine broken_json"): 1,
        ("dropped otherwise", "quarantine broken_json", "quarantine null_text"): 1,  # they stand one line further up
    }
    made.write(tmp_path / "rows.jsonl", ["A page that nobody has read before.", *pages])
    found = diff(one, PreparedCorpus(_prepare_again(tmp_path, "more", **ONLY_CLEAN, part_bytes="10MB")))
    check_sums(found)
    assert sum(documents for (kind, _, _), documents in kinds(found).items() if kind == "gained") == 1
    assert next(one for one in found if one.name == "pages").renamed == 20, "all rows are one line further down"


def test_another_file_is_matched_by_its_texts(tmp_path: Path) -> None:
    pages = made.pages(20)
    one, other = made.make(tmp_path / "a", pages, **ONLY_CLEAN), made.make(tmp_path / "b", [*pages[:19], "A new page."], **ONLY_CLEAN)
    found = diff(one, other)
    check_sums(found)
    assert kinds(found) == {("lost", "train", "not read"): 1, ("gained", "not read", "train"): 1}
    assert next(one for one in found if one.name == "pages").renamed == 19


def test_documents_that_go_to_another_place_have_moved(tmp_path: Path) -> None:
    one = made.make(tmp_path)
    found = diff(one, PreparedCorpus(_prepare_again(tmp_path, validation_fraction=0.0, decontaminate=None)))
    check_sums(found)
    held = [identity for identity in made.kept(one, "validation") if identity.startswith("pages/")]
    assert kinds(found)["moved", "validation/pages", "train/pages"] == len(held)
    pages = next(one for one in found if one.name == "pages")
    examples = {example["before"] for group in pages.groups if group.kind == "moved" for example in group.examples}
    assert examples <= set(held)


def test_a_source_by_another_name_has_moved(tmp_path: Path) -> None:
    plain = {"steps": [{"step": "clean"}], "validation_fraction": 0.0, "decontaminate": None}
    one = made.make(tmp_path, **plain)
    found = diff(one, PreparedCorpus(_prepare_again(tmp_path, sources=[made.source(tmp_path / "rows.jsonl", "leaves")], **plain)))
    kept = sum(identity.startswith("pages/") for identity in made.kept(one))
    assert kinds(found) == {("moved", "train/pages", "train/leaves"): kept}
    assert set(kinds(found, "code")) == {("lost", "train", "not read")}
    assert kinds(found, "leaves") == {}


def test_equal_texts_are_matched_one_to_one() -> None:
    import numpy as np

    hashes = np.array([5, 7, 5, 5, 7], dtype=np.uint64)
    keys = number_repeats(hashes)
    assert len(set(keys.tolist())) == 5
    assert set(number_repeats(hashes[[1, 0, 2]]).tolist()) <= set(keys.tolist()), "the first two fives and the first seven"
