"""Real text for the tokenizer's tests, and how to lay it out as a corpus."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# Article 1 of the Universal Declaration of Human Rights.
ARTICLE = {
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de conscience.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью.",
    "zh": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "ar": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق. وقد وهبوا عقلا وضميرا.",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
}


def write_source(corpus: Path, name: str, texts: list[str], split: str = "train", language: str = "en") -> None:
    table = {"id": [f"{name}/0/{n}" for n in range(len(texts))], "text": texts, "source": [name] * len(texts),
             "domain": ["other"] * len(texts), "language": [language] * len(texts),
             "origin": [f"{name}.txt:{n}" for n in range(len(texts))]}
    (corpus / split / name).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), corpus / split / name / "00000.parquet", row_group_size=7)


def library(*names: str) -> list[str]:
    return [Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8") for name in names]
