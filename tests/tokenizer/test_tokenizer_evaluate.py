from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from tokenizer_texts import ARTICLE, write_source

from lmworks.errors import UserError
from lmworks.tokenizer import Tokenizer
from lmworks.tokenizer.evaluate import evaluate, table


def test_numbers_are_what_they_say(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "the self zyzzyva"
    write_source(tmp_path, "words", [text, text], "validation")
    (row,) = evaluate({"this": tokenizer}, tmp_path / "validation")
    tokens = len(tokenizer.encode(text))
    assert [len(tokenizer.encode(word)) > 1 for word in ("the", " self", " zyzzyva")] == [False, False, True]
    assert (row["documents"], row["bytes"], row["tokens"], row["round_trip_failures"]) == (2, 32, 2 * tokens, 0)
    assert row["bytes_per_token"] == pytest.approx(16 / tokens)
    assert row["fertility"] == pytest.approx(tokens / 3)
    assert row["continued_words"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("hi", "हिन्दी में क्‍या लिखा है, कि नहीं?", ["हिन्दी", " में", " क्‍या", " लिखा", " है", " कि", " नहीं"]),
        ("bn", "আমি বাংলায় লিখি।", ["আমি", " বাংলায়", " লিখি"]),
        ("ta", "தமிழ் ஒரு மொழி.", ["தமிழ்", " ஒரு", " மொழி"]),
        ("th", "ฉันไปโรงเรียนทุกวัน", ["ฉัน", "ไป", "โรงเรียน", "ทุก", "วัน"]),
        ("km", "មនុស្សទាំងអស់កើតមក", ["មនុស្ស", "ទាំងអស់", "កើតមក"]),
        ("lo", "ມະນຸດທຸກຄົນເກີດມາ", ["ມະນຸດ", "ທຸກຄົນ", "ເກີດ", "ມາ"]),
        ("zh", "我们今天很好。", ["我们", "今天", "很好"]),
        ("ar", "كَتَبَ الوَلَدُ", ["كَتَبَ", " الوَلَدُ"]),
        ("en", "It's 3.14, isn't it?", ["It's", " 3.14", " isn't", " it"]),
    ],
)
def test_words_of_all_scripts_are_whole(tokenizer: Tokenizer, tmp_path: Path, language: str, text: str, words: list[str]) -> None:
    write_source(tmp_path, "one", [text], "validation", language)
    (row,) = evaluate({"this": tokenizer}, tmp_path / "validation")
    assert row["fertility"] == pytest.approx(len(tokenizer.encode(text)) / len(words))
    assert row["continued_words"] == pytest.approx(sum(len(tokenizer.encode(word)) > 1 for word in words) / len(words))


def test_others_are_measured_beside_ours_and_losses_are_seen(tokenizer: Tokenizer, trained: Path, tmp_path: Path) -> None:
    import tokenizers

    lossy = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "All": 1}, unk_token="[UNK]"))
    lossy.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    lossy.save(str(tmp_path / "lossy.json"))
    write_source(tmp_path, "world", list(ARTICLE.values()), "validation", "mixed")
    rows = evaluate({"this": tokenizer, "same": trained, "lossy": tmp_path / "lossy.json"}, tmp_path / "validation")
    this, same, lossy_row = rows
    assert this | {"tokenizer": ""} == same | {"tokenizer": ""}
    assert (this["round_trip_failures"], lossy_row["round_trip_failures"]) == (0, len(ARTICLE))
    text = io.StringIO()
    Console(file=text, width=160).print(table(rows))
    assert "exact" in text.getvalue()
    assert "9 of 9 lost" in text.getvalue()


def test_only_so_many_bytes_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_source(tmp_path, "words", ["x" * 100] * 50, "validation")
    (row,) = evaluate({"this": tokenizer}, tmp_path / "validation", max_bytes=950)
    assert row["documents"] == 10


def test_an_unreadable_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad\.json cannot be read as a tokenizer\.json"):
        evaluate({"bad": tmp_path / "bad.json"}, tmp_path)
