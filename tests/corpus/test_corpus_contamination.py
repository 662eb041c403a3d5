"""The contamination gate: leaks are found, boilerplate is not mistaken for one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from unicodedata import combining, normalize
from urllib.parse import quote, quote_plus

import numpy as np
import pytest

from lmworks.corpus.contamination import Decontaminator, Findings, Match, Shared, Widespread
from lmworks.corpus.contamination.readings import scan_forms

HELD = " ".join(f"held{number}" for number in range(60))
FILLER = " ".join(f"filler{number}" for number in range(40))


def findings(decontaminator: Decontaminator, documents: list[str]) -> Findings:
    """One batch each: batches must not matter."""
    return Findings.joined([(number, decontaminator.scan([document])) for number, document in enumerate(documents)])


def matches_of(decontaminator: Decontaminator, documents: list[str]) -> dict[int, list[Match]]:
    found = findings(decontaminator, documents)
    seen = decontaminator.count_documents([found])
    matches = {number: decontaminator.find_matches(documents[number], seen) for number in decontaminator.suspect_documents(found, seen)}
    return {number: passages for number, passages in matches.items() if passages}


def run(documents: list[str], held: list[str] | None = None, evaluation: list[str] | None = None) -> tuple[Decontaminator, dict[int, str]]:
    decontaminator = Decontaminator(13)
    decontaminator.protect([f"held/{place}" for place in range(len(held or []))], held or [], evaluation=False)
    decontaminator.protect([f"evaluation/{place}" for place in range(len(evaluation or []))], evaluation or [], evaluation=True)
    found = matches_of(decontaminator, documents)
    return decontaminator, {number: documents[number][match.start : match.end] for number, (match, *_) in found.items()}


def held_words(first: int, last: int) -> str:
    return " ".join(HELD.split()[first:last])


def test_thirteen_words_are_a_leak_and_twelve_are_not() -> None:
    _, found = run([f"{FILLER} {held_words(5, 18)} {FILLER}", f"{FILLER} {held_words(5, 17)} {FILLER}"], held=[HELD])
    assert found == {0: held_words(5, 18)}


def test_the_passage_is_the_whole_shared_run_in_the_documents_own_writing() -> None:
    shouted = held_words(3, 40).upper().replace(" ", ", ")
    _, found = run([FILLER, f"{FILLER}. {shouted}! {FILLER}"], held=[HELD])
    assert found == {1: shouted}


def test_runs_over_the_border_of_two_documents_do_not_count() -> None:
    decontaminator = Decontaminator(13)
    decontaminator.protect(["held"], [HELD], evaluation=False)
    assert not len(decontaminator.scan([f"{FILLER} {held_words(0, 7)}", f"{held_words(7, 14)} {FILLER}"]).rows)


def test_boilerplate_is_reported_and_drops_nothing() -> None:
    documents = [f"start{number} {held_words(0, 20)} end{number} {FILLER}" for number in range(11)]
    decontaminator, found = run(documents, held=[HELD])
    assert found == {}
    (told,), exempt = decontaminator.widespread_runs(decontaminator.count_documents([findings(decontaminator, documents)]))
    assert (told, exempt) == (Widespread(11, "held/0", held_words(0, 20), let_pass=True), 1)


def test_boilerplate_does_not_hide_a_leak_and_all_of_it_is_counted() -> None:
    decontaminator = Decontaminator(13)
    notices = [" ".join(f"notice{number}x{place}" for place in range(20)) for number in range(80)]
    decontaminator.protect([f"held/{number}" for number in range(80)], notices, evaluation=False)
    decontaminator.protect(["own/0"], [HELD], evaluation=True)
    documents = [f"start{number} " + f" {FILLER} ".join(notices) for number in range(13)]
    documents += [f"start{number} {HELD}" for number in range(11)]
    told, exempt = decontaminator.widespread_runs(decontaminator.count_documents([findings(decontaminator, documents)]))
    assert exempt == 80
    assert [one.let_pass for one in told] == [True] * 50 + [False]
    assert told[-1] == Widespread(11, "own/0", HELD, let_pass=False)


def test_ten_copies_are_still_leaks() -> None:
    _, found = run([f"start{number} {held_words(0, 20)} end{number}" for number in range(10)], held=[HELD])
    assert sorted(found) == list(range(10))


def test_a_few_words_beyond_boilerplate_are_no_leak_but_a_passage_is() -> None:
    common = [f"start{number} {held_words(0, 20)} end{number}" for number in range(12)]
    _, found = run([*common, f"{FILLER} {held_words(0, 22)}", f"{FILLER} {held_words(0, 30)}"], held=[HELD])
    assert found == {13: held_words(0, 30)}


def test_short_evaluation_items_are_looked_for_whole() -> None:
    question = "Which river flows through Vienna?"
    decontaminator, found = run(
        [f"{FILLER} which river flows through VIENNA {FILLER}", f"{FILLER} which river flows through Linz"], evaluation=[question]
    )
    assert found == {0: "which river flows through VIENNA"}
    assert decontaminator.trivial == {}


def test_trivial_evaluation_items_are_ignored_and_counted() -> None:
    decontaminator, found = run(["the answer is yes of course"], evaluation=["Yes", "the answer is yes"])
    assert found == {}
    assert decontaminator.trivial == {"evaluation": 2}


def test_a_whole_evaluation_item_is_a_leak_however_often_it_was_copied() -> None:
    item = held_words(0, 25)
    _, found = run([f"start{number} {item} end{number}" for number in range(30)], evaluation=[item])
    assert found == dict.fromkeys(range(30), item)


def test_in_chinese_twice_as_many_characters_make_a_leak() -> None:
    held = "新鮮果汁都是當場現榨絕對新鮮我特別推薦現榨柳橙汁選用台灣在地的甜橙酸甜平衡芒果汁使用愛文芒果濃郁香甜鳳梨汁則有特有的酸甜香氣"
    _, found = run([f"您好。{held[:26]}。謝謝", f"您好。{held[:25]}。謝謝"], held=[held])
    assert found == {0: held[:26]}


SUN = ("Which planet is nearest the sun?", "Mercury")
LAYOUTS = {
    "verbatim": "Which planet is nearest the sun? Mercury",
    "template": "Question: Which planet is nearest the sun?\nA. Venus\nB. Earth\nC. Mercury\nD. Mars\nAnswer: C",
    "shouted": "**WHICH  PLANET is nearest -- the SUN?** (mercury)",
    "in italics": "_Which planet is nearest the sun?_ Mercury",
    "in bold": "__Which planet is nearest the sun?__ **_Mercury_**",
    "with a comment": "Which planet is <!-- a hint: not Earth --> nearest the sun?\n<!-- answer -->Mercury",
    "in a comment": "<!-- Which planet is nearest the sun? Mercury -->",
    "quoted": "> Q: Which planet\n> is nearest\n> the sun?\n> A: Mercury",
}


def documents_matching(texts: list[str], question: str, answer: str) -> list[int]:
    decontaminator = Decontaminator(13)
    decontaminator.protect(["sky/1"], [question], [answer], evaluation=True)
    return sorted(matches_of(decontaminator, texts))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_short_question_is_found_with_its_answer_in_any_layout(layout: str) -> None:
    assert documents_matching([f"{FILLER}\n\n{LAYOUTS[layout]}\n\n{FILLER}"], *SUN) == [0]


def test_a_short_question_without_its_answer_nearby_is_what_people_ask() -> None:
    far = f"{SUN[0]} {FILLER} {FILLER} mercury"
    near = f"{SUN[0]} {FILLER} mercury"
    assert documents_matching([SUN[0], far, f"mercury {SUN[0]}", near], *SUN) == [3]


def test_eight_words_are_enough_alone() -> None:
    question = "Which planet is the nearest one to us?"
    assert documents_matching([f"{FILLER} {question}", question.replace("nearest", "farthest")], question, "Venus") == [0]


def test_a_question_too_short_to_be_told_is_found_by_its_answer() -> None:
    answer = "rub it gently with a soft towel"
    documents = [f"Dry hair: A. {FILLER} B. {answer}", f"{answer} dry hair", answer, "dry hair"]
    assert documents_matching(documents, "dry hair", answer) == [0]


def test_batches_of_many_documents_find_what_single_ones_do() -> None:
    texts = [f"{FILLER} {LAYOUTS['template']}", FILLER, f"{held_words(0, 20)} {SUN[0]}", f"{SUN[0]} mercury {held_words(3, 30)}", ""]
    decontaminator = Decontaminator(13)
    decontaminator.protect(["sky/1", "held/1"], [SUN[0], HELD], [SUN[1], ""], evaluation=True)
    whole = decontaminator.scan(texts).rows
    assert np.array_equal(whole, findings(decontaminator, texts).rows)
    assert set(whole[:, 0].tolist()) == {0, 2, 3}


def test_findings_of_parts_add_up_on_disk(tmp_path: Path) -> None:
    decontaminator = Decontaminator(13)
    decontaminator.protect(["held/0"], [HELD], evaluation=False)
    texts = [f"start{number} {held_words(0, 20)} end{number}" for number in range(12)]
    for number, half in enumerate((texts[:6], texts[6:])):
        findings(decontaminator, half).save(tmp_path / f"{number}.npy")
    loaded = [Findings.load(tmp_path / f"{number}.npy") for number in range(2)]
    seen = decontaminator.count_documents(loaded)
    assert seen.max() == 12
    assert np.array_equal(seen, decontaminator.count_documents([findings(decontaminator, texts)]))
    assert decontaminator.suspect_documents(loaded[0], seen) == []
    assert len(decontaminator.suspect_documents(loaded[0], decontaminator.count_documents(loaded[:1]))) == 6


def test_an_empty_gate_finds_nothing() -> None:
    decontaminator = Decontaminator(13)
    found = decontaminator.scan([FILLER])
    seen = decontaminator.count_documents([found])
    assert decontaminator.suspect_documents(found, seen) == []
    assert decontaminator.find_matches(FILLER, seen) == []
    assert decontaminator.widespread_runs(seen) == ([], 0)


def decontaminator_of(questions: list[tuple[str, str]]) -> Decontaminator:
    decontaminator = Decontaminator(13)
    decontaminator.protect([f"own/{number}" for number in range(len(questions))], *map(list, zip(*questions, strict=True)), evaluation=True)
    return decontaminator


def test_a_frequent_run_that_lies_in_the_answer_is_told_as_it_stands_there() -> None:
    decontaminator = decontaminator_of([("What follows?", held_words(0, 30))])
    documents = [f"start{number} {held_words(5, 25)} end{number}" for number in range(11)]
    (told,), _ = decontaminator.widespread_runs(decontaminator.count_documents([findings(decontaminator, documents)]))
    assert told == Widespread(11, "own/0", held_words(5, 25), let_pass=False)


def test_a_tag_does_not_reach_from_the_question_into_the_answer() -> None:
    decontaminator = decontaminator_of([("Is x <b", f"y> {held_words(0, 30)}")])
    documents = [f"start{number} {held_words(0, 30)} end{number}" for number in range(11)]
    (told,), _ = decontaminator.widespread_runs(decontaminator.count_documents([findings(decontaminator, documents)]))
    assert told == Widespread(11, "own/0", held_words(0, 30), let_pass=False)


def test_a_passage_of_question_and_answer_is_told_with_both() -> None:
    decontaminator = decontaminator_of([(f"{held_words(0, 20)}?", f"({held_words(20, 30)})")])
    documents = [f"start{number} {held_words(5, 28)} end{number}" for number in range(11)]
    (told,), _ = decontaminator.widespread_runs(decontaminator.count_documents([findings(decontaminator, documents)]))
    assert told == Widespread(11, "own/0", f"{held_words(5, 20)}\n{held_words(20, 28)}", let_pass=False)


def test_what_is_in_an_evaluation_set_is_a_leak_however_often_most_of_it_was_copied() -> None:
    decontaminator = decontaminator_of([(held_words(0, 40), "")])
    documents = [f"start{number} {held_words(0, 24)} end{number}" for number in range(30)]
    assert sorted(matches_of(decontaminator, documents)) == list(range(30))
    (told,), _ = decontaminator.widespread_runs(decontaminator.count_documents([findings(decontaminator, documents)]))
    assert told == Widespread(30, "own/0", held_words(0, 24), let_pass=False)


def test_a_passage_of_an_evaluation_set_is_a_leak_however_often_it_was_copied() -> None:
    """A passage too short to be the whole item, in more documents than boilerplate needs."""
    documents = [f"start{number} {held_words(5, 21)} end{number}" for number in range(12)]
    assert sorted(matches_of(decontaminator_of([(HELD, "")]), documents)) == list(range(12))


def test_how_a_set_asks_is_no_leak_and_told() -> None:
    template = held_words(0, 20)
    questions = [f"{template} {' '.join(f'item{number}x{place}' for place in range(20))}" for number in range(4)]
    decontaminator = decontaminator_of([(question, "") for question in questions])
    alike = f"{FILLER} {template} " + " ".join(f"other{place}" for place in range(20))
    leaked = f"{FILLER} {template} " + " ".join(f"item2x{place}" for place in range(13))
    assert sorted(matches_of(decontaminator, [alike, leaked])) == [1]
    assert decontaminator.shared() == [Shared("own", 8, held_words(0, 13))]


ITEM = (
    "A farmer who keeps bees notices in early spring that two of his seven hives stay silent although the willows are in bloom "
    "and the other hives fly busily. Which cause should he look for first before he opens them?"
)
_WORDS = ITEM.split()


def batched(words: list[str]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2] + [""] * (len(words) % 2), strict=True))


DEFACED = {
    "tags between all words": "<b>" + "</b> <b>".join(_WORDS) + "</b>",
    "tags with attributes": "".join(f'<span class="w {place}" id=w{place}>{word}</span>' for place, word in enumerate(_WORDS)),
    "entities for spaces": "&nbsp;".join(_WORDS),
    "entities in entities": "&amp;nbsp;".join(_WORDS),
    "escaped tags": "&lt;i&gt;" + "&lt;/i&gt; &lt;i&gt;".join(_WORDS),
    "a file of JSON": '{"q": "' + "\\n".join(_WORDS).replace("b", "\\u0062") + '"}',
    "comments between all words": "<!-- x -->".join(_WORDS),
    "escaped comments": " &lt;!-- a <b>note</b> --&gt; ".join(_WORDS),
    "comments in a file of JSON": '{"q": "' + "\\n\\u003c!-- x --\\u003e".join(_WORDS) + '"}',
    "emphasis on all words": "_" + "_ __".join(_WORDS) + "__",
    "underscores as entities": "&#95;" + "&#95; &#95;".join(_WORDS) + "&#95;",
    "links of Markdown": " ".join(f"[{word}](https://a.example/{place}_(b) 'title')" for place, word in enumerate(_WORDS)),
    "links by number": " ".join(f"[{word}][{place}]" if place % 2 else word for place, word in enumerate(_WORDS)),
    "links of wikis": " ".join(f"[[Page {place}|{word}]]" if place % 2 else f"[[{word}]]" for place, word in enumerate(_WORDS)),
    "links out of wikis": " ".join(f"[https://a.example/?q={place} {word}]" for place, word in enumerate(_WORDS)),
    "bold of wikis": " ".join(f"'''{word}'''" for word in _WORDS),
    "links of Org": " ".join(f"[[https://a.example/{place}][{word}]]" for place, word in enumerate(_WORDS)),
    "footnotes": " ".join(f"{word}[{place}]" for place, word in enumerate(_WORDS)),
    "footnotes of Markdown": " ".join(f"{word}[^note{place}]" for place, word in enumerate(_WORDS)),
    "footnotes in HTML": " ".join(f"{word}<sup>[{place}]</sup>" for place, word in enumerate(_WORDS)),
    "footnotes as superscripts": " ".join(f"{word}¹²" if len(word) > 2 else word for word in _WORDS),
    "bold of LaTeX": " ".join(rf"\textbf{{\emph{{{word}}}}}" for word in _WORDS),
    "old bold of LaTeX": " ".join(rf"{{\bf {word}}}" for word in _WORDS),
    "bulletin boards": " ".join(f"[b]{word}[/b] [url=https://a.example]{after}[/url]" for word, after in batched(_WORDS)),
    "roles of reStructuredText": " ".join(f":ref:`{word}` `{after} <https://a.example>`_" for word, after in batched(_WORDS)),
    "addresses between words": " ".join(f"{word} <https://a.example/{place}>" for place, word in enumerate(_WORDS)),
    "bold and struck": "**" + "** ~~".join(_WORDS).replace(" ~~", "~~ **") + "**",
    "code": "`" + "` `".join(_WORDS) + "`",
    "URL": quote(ITEM),
    "query of a URL": quote_plus(ITEM),
    "quoted-printable": "=\n".join(ITEM[place : place + 31] for place in range(0, len(ITEM), 31)),
    "broken words": " ".join(f"{word[:3]}-\n{word[3:]}" if len(word) > 5 else word for word in _WORDS),
    "quoted lines": "\n".join(f"> {word}" for word in _WORDS),
    "a table": "| " + " | ".join(_WORDS) + " |",
    "full width": "".join(chr(ord(char) + 0xFEE0) if char != " " else "\u3000" for char in ITEM),
    "joiners": "\u200d".join(ITEM),
    "zero-width spaces": "\u200b".join(ITEM),
    "soft hyphens": "\u00ad".join(ITEM),
    "mathematical letters": "".join(chr(0x1D41A + ord(char) - 97) if "a" <= char <= "z" else char for char in ITEM),
    "JSON in JSON": json.dumps({"a": json.dumps({"q": ITEM.replace(" ", "\n")})}),
    "JSON in JSON in JSON": json.dumps([json.dumps({"a": json.dumps({"q": ITEM.replace(" ", "\n")})})]),
    "one word in ten changed": " ".join("something" if place % 10 == 6 else word for place, word in enumerate(_WORDS)),
}


HALF = {normalize("NFKC", char): char for char in map(chr, range(0xFF66, 0xFF9E))}
HALF |= {normalize("NFKC", char + mark): char + mark for char in map(chr, range(0xFF66, 0xFF9E)) for mark in "\uff9e\uff9f"
         if len(normalize("NFKC", char + mark)) == 1}  # fmt: skip
SAME = {
    "Greek capitals": (
        "Ποιο ποτάμι περνάει μέσα από την πόλη και χύνεται στη θάλασσα κοντά στο παλιό λιμάνι των ψαράδων της ακτής;",
        str.upper,
    ),
    "Greek capitals without accents": (
        "Ποιο ποτάμι περνάει μέσα από την πόλη και χύνεται στη θάλασσα κοντά στο παλιό λιμάνι των ψαράδων της ακτής;",
        lambda text: "".join(char for char in normalize("NFD", text.upper()) if not combining(char)),
    ),
    "Turkish capitals": (
        "Hangi ırmak şehrin içinden geçip balıkçıların eski limanı yakınında denize dökülür ve kışın bile hiç donmaz, bilir misin?",
        lambda text: text.replace("i", "İ").replace("ı", "I").upper(),
    ),
    "Arabic vowels": (
        "أي نهر يمر في وسط المدينة ثم يصب في البحر قرب الميناء القديم للصيادين في الجنوب من البلاد؟",
        lambda text: "".join(f"{char}\u064e" if place % 2 else f"{char}\u0640" for place, char in enumerate(text)),
    ),
    "Arabic presentation forms": (
        "لا يمر النهر الا في وسط المدينة ثم لا يصب في البحر بل في بحيرة لا ماء فيها في الصيف",
        lambda text: text.replace("لا", "\ufefb").replace("م", "\ufee3"),
    ),
    "Hindi with joiners": (
        "कौन सी नदी शहर के बीच से होकर बहती है और मछुआरों के पुराने बंदरगाह के पास समुद्र में क्या लेकर गिरती है?",
        lambda text: text.replace("\u094d", "\u094d\u200d").replace("ी", "ी\u200c"),
    ),
    "Thai with zero-width spaces": (
        "แม่น้ำสายใดไหลผ่านใจกลางเมืองแล้วไหลลงสู่ทะเลใกล้ท่าเรือเก่าของชาวประมงทางทิศใต้ของประเทศ",
        lambda text: text.replace("น", "น\u200b"),
    ),
    "Japanese in half width": (
        "ドノカワガマチノナカヲナガレテフルイミナトノチカクデウミニソソグノカヲコタエテクダサイ",
        lambda text: "".join(HALF.get(char, char) for char in text),
    ),
    "Vietnamese, decomposed": (
        "Con sông nào chảy qua giữa thành phố rồi đổ ra biển gần bến cảng cũ của những người đánh cá ở phía nam đất nước?",
        lambda text: normalize("NFD", text),
    ),
}


@pytest.mark.parametrize("how", SAME)
def test_an_item_is_found_in_other_forms_of_its_letters(how: str) -> None:
    item, changed = SAME[how]
    assert changed(item) != item
    assert list(matches_of(decontaminator_of([(item, "")]), [FILLER, f"{FILLER}\n{changed(item)}\n{FILLER}"])) == [1]


WORKED = "First 16 - 3 - 4 = 9 eggs (16 - 7 = 9). Then 9 * 2 = 18, 18 / 3 = 6, 6 + 6 = 12 and 12 * 4 = 48.\n#### 48"


@pytest.mark.parametrize("how", DEFACED)
def test_an_answer_of_symbols_does_not_change_how_its_question_is_searched_for(how: str) -> None:
    alone, answered = decontaminator_of([(ITEM, "")]), decontaminator_of([(ITEM, WORKED)])
    text = f"{FILLER} {DEFACED[how]} {FILLER}"
    assert list(matches_of(alone, [text])) == list(matches_of(answered, [text])) == [0]
    assert answered.protected == {"own": 1} and answered.trivial == {}


def test_a_worked_answer_is_searched_for_with_its_symbols_and_a_short_question_with_its_answer() -> None:
    decontaminator = decontaminator_of([(ITEM, WORKED)])
    other = WORKED.replace("+", "/").replace("-", "*").replace("16", "17")
    assert sorted(matches_of(decontaminator, [f"{FILLER}\n{WORKED}\n{FILLER}", f"{FILLER}\n{other}\n{FILLER}"])) == [0]
    short = "How many eggs are left over?", "16 - 7 = 9"
    assert documents_matching([f"{FILLER} {short[0]} {FILLER}", f"{FILLER} {short[0]} Answer: {short[1]}"], *short) == [1]


def test_a_short_answer_alone_is_no_leak_whatever_its_question_is_made_of() -> None:
    said = "the square of the longer side"
    assert documents_matching([f"{FILLER} {said} {FILLER}"], PUZZLE[0], said) == []
    assert documents_matching([f"{FILLER} a ^ 2 + b ^ 2 = c ^ 2 {FILLER}"], ITEM, "a ^ 2 + b ^ 2 = c ^ 2") == []
    short = "Find the roots", "x ^ 2 + 3 * x - 7 = 0"
    assert documents_matching([f"{FILLER} {short[1]} {FILLER}", f"{FILLER} {short[0]}: {short[1]} {FILLER}"], *short) == [1]


def test_ten_words_of_thai_are_not_twenty_characters() -> None:
    war = "สงครามโลกครั้งที่สองในยุโรป"  # the Second World War in Europe: 27 code points, 22 characters with their marks, six words
    prose = f"หลังจาก{war}สิ้นสุดลง ผู้คนในหมู่บ้านก็กลับมาทำนากันอีกครั้งและสร้างบ้านของตนขึ้นใหม่"
    assert documents_matching([prose], "เหตุการณ์ใดทำให้แผนที่ของทวีปเปลี่ยนไปมากที่สุดในศตวรรษนี้", war) == []


def test_items_that_differ_in_what_their_tags_hold_are_found() -> None:
    rng = np.random.default_rng(1)
    paths = [" L ".join(f"{x:.2f},{y:.2f}" for x, y in rng.integers(10, 90, (7, 2))) for _ in range(30)]
    shapes = "Options:\n(A) circle\n(B) heptagon\n(C) hexagon\n(D) kite\n(E) line\n(F) octagon\n(G) pentagon\n(H) rectangle\n(I) sector"
    items = [(f'This SVG path element <path d="M {path}"/> draws a\n{shapes}', "(B)") for path in paths]
    decontaminator = decontaminator_of(items)
    assert decontaminator.protected == {"own": 30}
    documents = [f"{FILLER}\n{question}\n{FILLER}" for question, _ in items]
    other = documents[0].replace(paths[0], " L ".join(["12.00,34.00", "56.00,78.00", "11.00,22.00"] * 2))
    assert sorted(matches_of(decontaminator, [*documents, other])) == list(range(30))


@pytest.mark.parametrize("how", DEFACED)
def test_an_item_is_found_however_it_is_marked_up_or_changed(how: str) -> None:
    text = f"{FILLER} {DEFACED[how]} {FILLER}"
    found = matches_of(decontaminator_of([(ITEM, "")]), [FILLER, text])
    assert list(found) == [1]
    longest = text[found[1][0].start : found[1][0].end]
    assert len(longest) > len(DEFACED[how]) / 2
    assert longest in DEFACED[how]


def test_protected_text_with_comments_and_emphasis_is_found_without_them() -> None:
    decontaminator = decontaminator_of([("<!-- 7 --> " + ITEM.replace("two of his", "__two <!-- sic --> of__ _his_"), "")])
    assert list(matches_of(decontaminator, [FILLER, f"{FILLER} {ITEM}"])) == [1]


def test_held_out_text_inside_a_long_comment_is_protected() -> None:
    _, found = run([f"<p>{FILLER}</p> <!-- {held_words(5, 30)} -->"], held=[f"<!-- {HELD} -->"])
    assert found == {0: held_words(5, 30)}


def test_an_underscore_inside_a_name_belongs_to_it_and_unclosed_comments_take_linear_time() -> None:
    assert scan_forms("a_b __init__ x__y _ ___ c_") == ["a_b  init  x__y     c "]
    assert scan_forms("<!-- a <!-- b --> c -->") == ["<!-- a   c -->", "<!-- a <!-- b --> c -->"]
    text = "<!-- " * 200_000 + "_ " * 200_000
    begun = time.process_time()
    assert len(scan_forms(text)) == 2
    assert time.process_time() - begun < 5  # quadratic time would be hours


UNCLOSED = ("[", "[a|", "[a](b", "%20", "=4", "\\textbf{", "{\\bf ", "`a <", "**a", "[^", "[1,", "<a b=", "[//a ", "[[a][", "a_", "\\\\n")


@pytest.mark.parametrize("start", UNCLOSED)
def test_unclosed_markup_takes_linear_time(start: str) -> None:
    begun = time.process_time()
    assert scan_forms(start * (200_000 // len(start)))
    assert time.process_time() - begun < 5


def test_a_few_common_words_are_no_item_with_changes() -> None:
    decontaminator = decontaminator_of([(ITEM, "")])
    text = "A farmer who keeps bees notices in early summer that all of his hives are in bloom and the other hives fly."
    assert matches_of(decontaminator, [text]) == {}


def test_a_long_answer_is_found_alone() -> None:
    answer = "open the lid slowly and look for mites on bees"
    assert documents_matching([f"{FILLER} {answer} {FILLER}", answer.replace("mites", "honey")], "What now?", answer) == [0]


PUZZLE = ("Solve: ((a + b) * (c - d)) / [e ^ f] = {g & h} | ~(i % j) + k * (l - m)", "")


def test_symbols_count_where_an_item_is_made_of_them() -> None:
    decontaminator = decontaminator_of([PUZZLE])
    other = PUZZLE[0].replace("+", "-").replace("*", "/").replace("[e", "(e").replace("&", "<")
    assert sorted(matches_of(decontaminator, [f"{FILLER}\n{PUZZLE[0]}\n{FILLER}", f"{FILLER}\n{other}\n{FILLER}"])) == [0]


@pytest.mark.parametrize("how", [quote, quote_plus, str.swapcase, json.dumps])
def test_an_item_of_symbols_is_found_through_encodings(how: Callable[[str], str]) -> None:
    text = f"{FILLER}\nhttps://a.example/?q={how(PUZZLE[0])}\n{FILLER}"
    assert list(matches_of(decontaminator_of([PUZZLE]), [text])) == [0]


def test_an_item_of_symbols_is_found_in_bold_and_in_a_quotation() -> None:
    pieces = PUZZLE[0].replace("*", "/").split()
    changed = " ".join(f"**{piece}**" for piece in pieces), "\n".join(f"> {piece}" for piece in pieces)
    documents = [f"{FILLER}\n{text}" for text in changed]
    assert sorted(matches_of(decontaminator_of([(" ".join(pieces), "")]), documents)) == [0, 1]


def test_an_item_of_symbols_alone_is_looked_for() -> None:
    maze = "##.#..#.#\n#..##.#.#\n#.#..#..#\n##...##.#"
    decontaminator = decontaminator_of([(maze, "")])
    assert decontaminator.trivial == {}
    assert sorted(matches_of(decontaminator, [f"{FILLER}\n{maze}\n", maze.replace("..#", ".#.")])) == [0]
