"""What is told of rows that were left out."""

from __future__ import annotations

from lmworks.train.data.sets import LeftOut


def test_files_without_a_good_row_are_named_and_their_number_is_bounded() -> None:
    lost = LeftOut()
    lost.keep("a.jsonl:1")
    for number in range(40):
        lost.add(f"b{number}.jsonl:1", "of no known form")
        lost.add(f"a{number}.txt:1", "repeated")  # its text is used, from another file
        lost.add(f"aiw/{number}", "asked by the evaluation")  # a generated question has no file
    told = lost.lost_files()
    assert told[0] == "nothing of b0.jsonl is used: b0.jsonl:1: of no known form"
    assert len(told) == 4 and told[-1] == "nothing of 37 more files is used"
    assert lost.counts == {"of no known form": 40, "repeated": 40, "asked by the evaluation": 40}
