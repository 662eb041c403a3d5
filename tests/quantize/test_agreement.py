"""How a quantized model is compared with its original, against the definitions, also across blocks of rows."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
import torch

from lmworks.errors import UserError
from lmworks.quantize import agreement
from lmworks.quantize.agreement import _compare


@pytest.mark.parametrize("rows", [2, 3, 256])
def test_divergence_first_choice_and_loss_are_those_of_the_definitions(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(agreement, "_ROWS", rows)
    draw = torch.Generator().manual_seed(1)
    ours, theirs = torch.randn(2, 7, 5, generator=draw).unbind(0)
    ids = torch.randint(5, (7,), generator=draw)
    nats, same, losses = _compare(ours, theirs, ids)
    p, q = (logits.double().softmax(-1).tolist() for logits in (ours, theirs))
    for row in range(7):
        assert nats[row] == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p[row], q[row], strict=True)))  # of q from p
        assert same[row] == (p[row].index(max(p[row])) == q[row].index(max(q[row])))
    assert not same.all() and same.any()
    for found, side in zip(losses, (p, q), strict=True):  # each row predicts the next token; the last one predicts none
        assert found == pytest.approx(-sum(math.log(side[row][ids[row + 1]]) for row in range(6)))


def test_what_is_not_finite_is_infinitely_far() -> None:
    ours, theirs = torch.zeros(2, 3, 4)
    theirs[1, 2] = math.nan
    nats, _, _ = _compare(ours, theirs, torch.tensor([0, 1, 2]))
    assert nats.tolist() == [0.0, math.inf, 0.0]


TEXT = "A text of one document.\n\n\nIts second part, behind two blank lines."
ROWS = "".join(json.dumps({"text": f"{part}\u2028and\x85more", "domain": "web"}, ensure_ascii=False) + "\n" for part in ("One", "Two"))


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("plain.txt", TEXT.encode(), {"text": [TEXT]}),
        ("NOTES.MD", b"\xef\xbb\xbf" + TEXT.encode(), {"text": [TEXT]}),
        ("rows [1].jsonl", b"\xef\xbb\xbf" + ROWS.encode(), {"web": ["One\u2028and\x85more", "Two\u2028and\x85more"]}),
        ("ROWS.JSONL.gz", gzip.compress(ROWS.encode()), {"web": ["One\u2028and\x85more", "Two\u2028and\x85more"]}),
    ],
)
def test_text_is_read_from_files_as_they_are_found(tmp_path: Path, name: str, data: bytes, expected: dict[str, list[str]]) -> None:
    (tmp_path / name).write_bytes(data)
    assert agreement._file(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.pdf", b"%PDF", r"has no data files; give .*\.jsonl"),
        ("a.jsonl", b'{"text": "cut', r"cannot be read: "),
        ("a.jsonl", b'["text"]', r"row 0 is no JSON object"),
        ("a.jsonl", b'{"content": "x"}', r"row 1 has no text under 'text'"),
        ("a.txt", b" \n", "holds no text"),
    ],
)
def test_files_without_text_are_refused(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=reason):
        agreement._file(tmp_path / name)
