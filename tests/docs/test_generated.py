"""Pages that are made from the code are as it would make them now (docs/generated.py)."""

from __future__ import annotations

from doc_pages import ROOT, script

from lmworks.ablate.kinds import kinds
from lmworks.doctor.answers import ANSWERS, REFUSED
from lmworks.watch.diagnosis import all_rules
from lmworks.watch.rule import SYMPTOMS

DOCS = ROOT / "docs"


def test_the_page_of_the_rules_is_made_from_them() -> None:
    assert (DOCS / "rules.md").read_text() == script("generated").rules() + "\n", "python docs/generated.py rules > docs/rules.md"


def test_every_kind_of_ablation_has_its_keys_on_the_page() -> None:
    assert script("generated").ablations() in (DOCS / "ablations.md").read_text(encoding="utf-8"), "python docs/generated.py ablations"
    names = "arms anneal architecture batch critical-batch learning-rate mixture noise optimizer tokenizer"
    assert set(kinds()) == set(names.split())


def test_keys_of_other_tools() -> None:
    assert (DOCS / "coming-from.md").read_text(encoding="utf-8") == script("generated").coming_from() + "\n", (
        "python docs/generated.py coming-from, and write that over docs/coming-from.md"
    )


def test_the_causes_of_the_doctor() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert page == script("generated").troubleshooting() + "\n", (
        "python docs/generated.py troubleshooting, and write that over docs/troubleshooting.md"
    )
    assert all(f"### {words}" in page for words in SYMPTOMS.values()) and all(f"### `{code}`" in page for code in all_rules())


def test_every_issue_of_the_guide_is_answered_by_a_cause_that_exists_or_by_somebody_else() -> None:
    named = {code for answer in ANSWERS for code in answer.codes}
    assert named <= set(all_rules()), "codes of doctor/answers.py that no rule has"
    assert all(answer.codes or answer.elsewhere for answer in ANSWERS)
    assert len({answer.issue for answer in ANSWERS}) == 17 and len(ANSWERS) >= 40 and len(REFUSED) >= 7
