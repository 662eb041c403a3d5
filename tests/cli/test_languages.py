"""From the command line: prose of many languages is kept, repeated lines are not, and an item is found through markup."""

from __future__ import annotations

import json
from pathlib import Path
from unicodedata import normalize

import pyarrow.parquet as pq
from command import Lmworks

from lmworks.io.run_layout import corpus_files
from paragraphs import PARAGRAPHS
from tiny_run import Tiny

ITEM = "Which of the four winds carries the salt of the seventh sea over the glass hills before the first bell of autumn rings twice?"
WORKED = "16 - 3 - 4 = 9, 9 * 2 = 18, 18 / 3 = 6, 6 + 6 = 12, 12 * 4 = 48, 48 / 2 = 24"
PHONES = {"hi": "फ़ोन: ०२२ २३४५ ६७८९", "ru": "Тел.: 8 (495) 123-45-67", "th": "โทร. ๐๒-๑๒๓-๔๕๖๗"}


def test_text_of_27_languages_is_prepared(lmworks: Lmworks, tiny: Tiny, tmp_path: Path) -> None:
    rows = [{"text": f"{text}\n{PHONES.get(language, '')}".strip(), "language": language} for language, text in PARAGRAPHS.items()]
    rows += [{"text": "\n".join([text] * 5), "language": language} for language, text in PARAGRAPHS.items()]
    leak = " ".join(f"[{word}](https://a.example)" for word in ITEM.split())
    rows.append({"text": f"{PARAGRAPHS['en']}\n{leak}", "language": "en"})
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.jsonl").write_text(json.dumps({"q": ITEM, "a": WORKED}) + "\n")
    source = f"{{name: pages, kind: jsonl, path: {tmp_path}/pages.jsonl, domain: web, license: x, language_key: language}}"
    phases = [{"name": "all", "tokens": "5Ki", "mixture": {"pages": 1}, "sequence_length": "64 tokens", "global_batch_tokens": "1Ki"}]
    changes = (
        f"run_dir={tmp_path}/run", f"corpus.sources=[{source}]", "corpus.validation_fraction=0", f"train.phases={json.dumps(phases)}",
        "corpus.steps=[{step: clean}, {step: pii}, {step: rules}]",
        f"evaluate.protect=[{{name: own, path: {tmp_path}/own.jsonl, question: q, answer: a}}]",
    )  # fmt: skip
    done = lmworks("corpus", "prepare", tiny.recipe, *(part for change in changes for part in ("--set", change)))
    assert done.code == 0, done.err
    files = [path for some in corpus_files(tmp_path / "run" / "corpus", "train").values() for path in some]
    kept = [row for path in files for row in pq.read_table(path, columns=["text", "language"]).to_pylist()]
    assert sorted(row["language"] for row in kept) == sorted(PARAGRAPHS)
    texts = {row["language"]: row["text"] for row in kept}
    assert all(texts[language].startswith(normalize("NFC", text)) for language, text in PARAGRAPHS.items())
    assert all(texts[language].endswith("<PHONE>") for language in PHONES)
    assert ITEM.split()[-3] not in texts["en"]
