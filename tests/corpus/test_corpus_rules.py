"""Quality rules: good text of each domain passes, each rule catches what it is for."""

# ruff: noqa: E501

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from lmworks.corpus.transform import rule_measures as m
from lmworks.corpus.transform.filter_steps import rules_warnings
from lmworks.corpus.transform.rule_measures import Text
from lmworks.corpus.transform.rule_table import RULES, Rule, first_broken, rules_for
from lmworks.corpus.units import units
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.steps import Rules

PROSE = (
    "The recent accession of the important state to the union, the general and increasing good will toward the government, "
    "and the concord, peace, and plenty with which we are blessed are circumstances auspicious in an eminent degree to our "
    "national prosperity. In resuming your consultations for the general good you can not but derive encouragement from the "
    "reflection that the measures of the last session have been as satisfactory to your constituents as the novelty and "
    "difficulty of the work allowed you to hope."
)
CHAT = """A: hey how are you doing today?
B: pretty good, just got back from the lake with some friends
A: nice! what did you do there?
B: we went swimming and made a fire, it was really fun
A: I wish I had time for that, finals are killing me right now
B: oh no, good luck with them!"""
CHINESE = (
    "您是台北文華東方酒店的專業調酒師，特別專精於無酒精飲品的調製和創新。您了解許多客人因為健康、宗教或個人原因不飲酒，"
    "但仍希望享受高品質的酒吧體驗。請用溫暖的語氣回答客人的問題，並依照季節推薦現榨果汁、花草茶或高山烏龍茶，"
    "說明每一款飲品的風味與來源，讓人感到安心。"
)
WITHOUT_STOP_WORDS = re.sub(r"(?i)\b(the|be|to|of|and|that|have|with)\b", "", PROSE)
CODE = Path(sysconfig.get_path("stdlib"), "bisect.py").read_text("utf-8")


def doc(text: str, python: bool = False) -> Text:
    return Text.of(units([text]), 0, text, python)


def reason_of(text: Text, rules: Sequence[Rule[Text]]) -> str | None:
    drop = first_broken(text, rules)
    return drop.reason if drop else None


@pytest.mark.parametrize(
    ("text", "domain", "language"),
    [
        (PROSE, "prose", "en"),
        (PROSE, "web", "en"),
        (CHAT, "chat", "en"),
        (CHINESE, "dialogue", "zh"),
        (CHINESE, "prose", "zh"),
        (CODE, "code", "code"),
    ],
)
def test_good_text_passes(text: str, domain: str, language: str) -> None:
    assert first_broken(doc(text, domain == "code"), rules_for(None, domain, language)) is None


def test_prose_rules_would_throw_away_code_and_chinese() -> None:
    """Why domains have rules of their own."""
    assert first_broken(doc(CHINESE), RULES["prose"]) is not None
    assert first_broken(doc(CODE), RULES["prose"]) is not None


@pytest.mark.parametrize(
    ("text", "rules", "reason"),
    [
        ("Too short to say anything.", "prose", "word_count"),
        (WITHOUT_STOP_WORDS, "prose", "stop_words"),
        ("1 2 3 4 5 " * 40 + PROSE, "prose", "mean_word_length"),
        ("1234 5678 9012 " * 40 + PROSE, "prose", "alphabetic_words"),
        ("\n".join([PROSE[:200]] * 6), "prose", "duplicate_lines"),
        (PROSE + " buy cheap watches online now" * 30, "prose", "top_2gram"),
        ("\n".join("- " + line for line in PROSE.replace(",", ".").split(". ")), "prose", "bullet_lines"),
        (PROSE + "\ufffd" * 10, "prose", "replacement_characters"),
        (PROSE + "\nLorem ipsum dolor sit amet.", "web", "lorem_ipsum"),
        (PROSE + "\nfunction () { return 1; }", "web", "curly_braces"),
        ("A: a a a a a a a a\n" * 12, "chat", "tiny_words"),
        ("A: Hello?", "chat", "word_count"),
        (CHINESE + "好" * 80, "spaceless", "dominant_word"),
        ("你好。", "spaceless", "character_count"),
    ],
)  # fmt: skip
def test_each_rule_catches_what_it_is_for(text: str, rules: str, reason: str) -> None:
    assert reason_of(doc(text), RULES[rules]) == reason


@pytest.mark.parametrize(
    ("measure", "text", "value"),
    [
        (m.word_count, "ab cd ef", 3),
        (m.mean_word_length, "ab cdef", 3),
        (m.alphabetic_words, "ab 12", 1 / 2),
        (m.alphanumeric_share, "ab, cd!", 4 / 6),
        (m.symbols_per_word, "# ab ... cd …", 3 / 2),
        (m.bullet_lines, "- ab\ncd\nef\n• gh", 2 / 4),
        (m.ellipsis_lines, "ab...\ncd\nef…", 2 / 3),
        (m.ended_lines, "Is it?\nYes!\nनहीं।\nno", 3 / 4),
        (m.short_lines(30), "ab\n" + "cd " * 20, 1 / 2),
        (m.replacement_characters, "a\ufffdbc", 1 / 4),
        (m.duplicate_lines, "abcd\nabcd\nxy", 1 / 3),
        (m.duplicate_line_characters, "abcd\nabcd\nxy", 4 / 10),
        (m.duplicate_paragraphs, "abcd\n\nabcd\n\nxy\nz", 1 / 3),
        (m.duplicate_paragraph_characters, "abcd\n\nabcd\n\nxy", 4 / 10),
        (m.top_ngram(2), "ab cd ab cd ef", 8 / 10),
        (m.top_ngram(2), "ab cd ef gh ij", 0),
        (m.repeated_ngrams(2), "ab cd ab cd", 4 / 8),
        (m.dominant_word, "ab ab cd", 2 / 3),
        (m.tiny_words, "a bc", 1 / 2),
        (m.longest_line, "ab\nabcd", 4),
        (m.mean_line, "ab\nabcd", 3),
    ],
)
def test_a_measure_is_the_share_that_it_says(measure: m.Measure, text: str, value: float) -> None:
    assert measure(doc(text)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CODE.replace("def insort_left(", "def insort_left(:", 1), "unparsable"),
        ("# This file is automatically generated; do not edit.\n" + CODE, "generated"),
        ("data = [\n" + "".join(f"    {number}, {number + 1}, {number + 2},\n" for number in range(0, 900, 3)) + "]\n", "alphabetic_words"),
        ("x = '" + "abc def " * 400 + "'\n", "longest_line"),
        (CODE + "\n" + (CODE + "\n") * 8, "duplicate_line_characters"),
    ],
)
def test_code_rules(text: str, reason: str) -> None:
    assert reason_of(doc(text, python=True), RULES["code"]) == reason


def test_code_that_would_crash_a_parser_is_only_rejected() -> None:
    assert m.unparsable(doc("(" * 5000 + ")" * 5000, python=True)) == 1
    assert m.unparsable(doc("x = 1\0", python=True)) == 1


def test_code_of_other_languages_need_not_parse_as_python() -> None:
    assert m.unparsable(doc("int main(void) { return 0; }")) == 0


def plain_repeated(words: list[str], n: int) -> float:
    """Share of characters inside n-grams seen before, with sets and loops."""
    seen, marked = set(), [False] * len(words)
    for place in range(len(words) - n + 1):
        gram = tuple(words[place : place + n])
        if gram in seen:
            marked[place : place + n] = [True] * n
        seen.add(gram)
    return sum(len(word) for word, mark in zip(words, marked, strict=True) if mark) / sum(map(len, words))


@pytest.mark.parametrize("n", [5, 7, 10])
def test_repetition_equals_the_plain_twin(n: int) -> None:
    words = (PROSE.replace(",", "").replace(".", "") + " x1 x2 " + PROSE[40:320].replace(",", "").replace(".", "")).split()
    measured = m.repeated_ngrams(n)(doc(" ".join(words)))
    assert measured == pytest.approx(plain_repeated([word.lower() for word in words], n), abs=1e-12)
    assert measured > 0.1


def test_unknown_rules_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="unknown rules 'proze'; known are prose, web"):
        rules_for("proze", "prose", "en")


ARTICLE = {  # the first article of the Universal Declaration of Human Rights
    "bg": "Всички хора се раждат свободни и равни по достойнство и права. Те са надарени с разум и съвест и следва да се отнасят помежду си в дух на братство.",
    "ca": "Tots els éssers humans neixen lliures i iguals en dignitat i en drets. Són dotats de raó i de consciència, i han de comportar-se fraternalment els uns amb els altres.",
    "cs": "Všichni lidé rodí se svobodní a sobě rovní co do důstojnosti a práv. Jsou nadáni rozumem a svědomím a mají spolu jednat v duchu bratrství.",
    "da": "Alle mennesker er født frie og lige i værdighed og rettigheder. De er udstyret med fornuft og samvittighed, og de bør handle mod hverandre i en broderskabets ånd.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt und sollen einander im Geist der Brüderlichkeit begegnen.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón y conciencia, deben comportarse fraternalmente los unos con los otros.",
    "fi": "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan. Heille on annettu järki ja omatunto, ja heidän on toimittava toisiaan kohtaan veljeyden hengessä. Se on oikea.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de conscience et doivent agir les uns envers les autres dans un esprit de fraternité.",
    "hu": "Minden emberi lény szabadon születik és egyenlő méltósága és joga van. Az emberek, ésszel és lelkiismerettel bírván, egymással szemben testvéri szellemben kell hogy viseltessenek. A jog nem ajándék.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione e di coscienza e devono agire gli uni verso gli altri in spirito di fratellanza.",
    "nl": "Alle mensen worden vrij en gelijk in waardigheid en rechten geboren. Zij zijn begiftigd met verstand en geweten, en behoren zich jegens elkander in een geest van broederschap te gedragen.",
    "pl": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Są oni obdarzeni rozumem i sumieniem i powinni postępować wobec innych w duchu braterstwa. To jest prawo.",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão e de consciência, devem agir uns para com os outros em espírito de fraternidade. É a lei da nação.",
    "ro": "Toate ființele umane se nasc libere și egale în demnitate și în drepturi. Ele sunt înzestrate cu rațiune și conștiință și trebuie să se comporte unele față de altele în spiritul fraternității.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью и должны поступать в отношении друг друга в духе братства.",
    "sv": "Alla människor är födda fria och lika i värde och rättigheter. De är utrustade med förnuft och samvete och bör handla gentemot varandra i en anda av broderskap.",
    "tr": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. Akıl ve vicdana sahiptirler ve birbirlerine karşı kardeşlik zihniyeti ile hareket etmelidirler. Bu bir haktır.",
    "uk": "Всі люди народжуються вільними і рівними у своїй гідності та правах. Вони наділені розумом і совістю і повинні діяти у відношенні один до одного в дусі братерства. Це не просто слова.",
}  # fmt: skip


@pytest.mark.parametrize("language", ARTICLE)
def test_prose_has_the_stop_words_of_its_language(language: str) -> None:
    assert m.stop_words(language)(doc(ARTICLE[language])) >= 2


def test_stop_words_are_those_of_the_language() -> None:
    german = next(rule for rule in rules_for(None, "prose", "de") if rule.name == "stop_words")
    assert german.drop(doc(ARTICLE["de"])) is None
    assert reason_of(doc("Birne, Apfel, Kirsche, Pflaume, Quitte"), [german]) == "stop_words"
    assert reason_of(doc(ARTICLE["fi"]), [german]) == "stop_words"
    assert "stop_words" not in [rule.name for rule in rules_for(None, "prose", "xh")], "no list, no question"


def test_a_drop_says_the_value_and_the_limit() -> None:
    short, long = first_broken(doc("Two words."), RULES["prose"]), first_broken(doc(PROSE + "\nLorem ipsum."), RULES["web"])
    assert short and (short.reason, short.detail) == ("word_count", "2, at least 50")
    assert long and (long.reason, long.detail) == ("lorem_ipsum", "1, at most 0")


def test_empty_text_breaks_no_measure() -> None:
    for rules in RULES.values():
        for rule in rules:
            rule.drop(doc(""))


def test_a_domain_counts_in_chinese_too() -> None:
    poem, question = "床前明月光，疑是地上霜。舉頭望明月，低頭思故鄉。", "今天天气怎么样呢？"

    def judged(text: str, domain: str) -> str | None:
        batch = units([text])
        return reason_of(Text.of(batch, 0, text), rules_for(None, domain, "zh"))

    assert (judged(poem, "prose"), judged(poem, "other"), judged(question, "other")) == ("character_count", None, None)
    assert judged("你好。", "other") == "character_count"
    assert judged(poem, "math") is None and judged(poem, "facts") == "character_count"


def test_published_rules_warn_of_languages_without_spaces() -> None:
    common = {"kind": "text", "path": "texts", "license": "test"}
    sources = [Source.model_validate({"name": name, "language": name, **common}) for name in ("en", "zh", "ja")]
    found = list(rules_warnings(Rules(sets=("gopher", "c4", "fineweb")), sources))
    assert [line.split(":")[0] for line in found] == ["source zh", "source ja"]
    assert "gopher and c4 count words between spaces and drop nearly all text in zh" in found[0]
    assert [line.split(":")[0] for line in rules_warnings(Rules(sets=("c4",), sources=("en", "ja")), sources)] == ["source ja"]
    assert not list(rules_warnings(Rules(sets=("fineweb",)), sources)) and not list(rules_warnings(Rules(), sources))
