"""HTML, WARC, LaTeX, notebooks and Markdown as text, and documents that make their parsers hang or die."""

from __future__ import annotations

import gzip
import io
import json
import time
from pathlib import Path

import pytest
from source_items import items, reasons, texts

from lmworks.corpus.read import markup
from lmworks.corpus.read.markup import _BLANK, decoded, decoded_latex, to_text, unescaped, with_letters

PAGE = """<html><head><title>T</title><script>alert(1)</script></head><body><nav><a href="/">Home</a> <a href="/b">Shop</a></nav>
<article><h1>The heading</h1><p>Some prose with snake_case and a*b and 1 &lt; 2, long enough to be taken for content by anyone.</p>
<pre><code>def f(x_1):
    return x_1 * 2</code></pre><ul><li>first point</li><li>second point</li></ul>
<p>More prose follows here, in a second paragraph with words enough to be kept, naïve 文書 included.</p></article>
<footer>Copyright, cookies and imprint</footer></body></html>"""
TEXT_OF_PAGE = """# The heading

Some prose with snake_case and a*b and 1 < 2, long enough to be taken for content by anyone.

```
def f(x_1):
    return x_1 * 2
```
- first point
- second point

More prose follows here, in a second paragraph with words enough to be kept, naïve 文書 included."""
JAPANESE = "日本語の文章です。"
HANGS = b"<html><body><div " + b" ".join(b'a%d="x"' % number for number in range(200_000)) + b">text</div>"


def test_pages_become_markdown_without_navigation(tmp_path: Path) -> None:
    pytest.importorskip("trafilatura")
    encodings = ("shift_jis", "utf-16", "utf-8")
    for encoding in encodings:
        page = PAGE.replace("<head>", f'<head><meta charset="{encoding}">').replace("naïve ", "" if encoding == "shift_jis" else "naïve ")
        (tmp_path / f"{encoding}.html").write_bytes(page.encode(encoding))
    windows = PAGE.replace("<head>", "<head><meta charset=iso-8859-1>").replace("naïve 文書", "l&#146;or\x92")
    (tmp_path / "windows.html").write_bytes(windows.encode("latin-1"))
    (tmp_path / "x.html").write_bytes(PAGE.replace("naïve ", "\ufffd" * 40).encode())
    (tmp_path / "y.html").write_bytes(PAGE.replace("naïve ", "\ufffd l\x92 ").encode())
    found = items("html", path=str(tmp_path))
    assert texts(found)[:3] == [TEXT_OF_PAGE.replace("naïve ", ""), TEXT_OF_PAGE, TEXT_OF_PAGE]
    assert [item.facts for item in found[:3]] == [{"path": f"{tmp_path}/{encoding}.html"} for encoding in encodings]
    assert texts(found)[3:] == [TEXT_OF_PAGE.replace("naïve 文書", "l’or’"), TEXT_OF_PAGE.replace("naïve ", "\ufffd l’ ")]
    assert reasons(found) == ["bad_utf8"], "more than some characters are replaced"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("é".encode(), "é"),
        (b"\xef\xbb\xbfa", "a"),
        ("é".encode("utf-16"), "é"),
        (b'<meta charset="latin-1">\xe9', '<meta charset="latin-1">é'),
        (b'<meta charset="latin-1">\x93\x81', '<meta charset="latin-1">\x93\x81'),
        *(
            (f'<meta charset="{name}">{text}'.encode(encoding), f'<meta charset="{name}">{text}')
            for name, encoding, text in (
                ("iso-8859-1", "cp1252", "“€”"),
                ("us-ascii", "cp1252", "’"),
                ("iso-8859-9", "cp1254", "“ğ”"),
                ("tis-620", "cp874", "“ก”"),
                ("Shift_JIS", "cp932", "①㈱髙"),
                ("x-sjis", "cp932", "日①"),
                ("gb2312", "gbk", "镕喆"),
                ("gbk", "gb18030", "㐀"),
                ("euc-kr", "cp949", "똠"),
                ("big5", "cp950", "碁銹"),
                ("big5", "big5hkscs", "佢哋"),
                ("x-cp1251", "cp1251", "да"),
            )
        ),
        ('<?xml version="1.0" encoding="windows-1251"?>да'.encode("cp1251"), '<?xml version="1.0" encoding="windows-1251"?>да'),
        (b'<meta charset="hex">\xe9', b'<meta charset="hex">\xe9'),
        (b"<meta charset=no-such>\xe9", b"<meta charset=no-such>\xe9"),
        (b"\xe9", b"\xe9"),
        ("é".encode("utf-32"), "é"),
        (f'<meta charset="iso-2022-jp">{JAPANESE}'.encode("iso-2022-jp"), f'<meta charset="iso-2022-jp">{JAPANESE}'),
        (b'<meta charset="hz-gb-2312">~{VPND~}', '<meta charset="hz-gb-2312">中文'),
        (f'<meta charset="iso-2022-jp">{JAPANESE}'.encode(), f'<meta charset="iso-2022-jp">{JAPANESE}'),
        (b'<meta charset="punycode">\xe9', b'<meta charset="punycode">\xe9'),
    ],
)
def test_a_page_is_read_as_it_says(data: bytes, text: str | bytes) -> None:
    assert decoded(data) == text


def test_control_characters_of_a_page_are_letters() -> None:
    assert with_letters("a&#146;b&#x92;c&#0145d&#x0091;e\x92f&#1469;&#x921;&#161;\x81") == "a’b’c‘d‘e’f&#1469;&#x921;&#161;\x81"


def test_only_code_keeps_its_backslashes() -> None:
    assert unescaped("a\\_b `c\\_d` \\*\n```\n\\_\n```\n\\# Heading¶") == "a_b `c\\_d` *\n```\n\\_\n```\n# Heading"


def test_long_runs_of_spaces_are_looked_through_once() -> None:
    """Searched from each of their spaces they took minutes, in the process that reads and not in the one with limits."""
    begin = time.process_time()
    text = (" " * 200_000 + "x") * 2
    assert unescaped(text + "\n## Heading \t¶  ") == text + "\n## Heading"
    assert _BLANK.sub("\n\n", text + " \n \n\t\n") == text + "\n\n"
    assert time.process_time() - begin < 10


def test_a_page_that_hangs_its_parser_costs_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trafilatura")
    monkeypatch.setattr(markup, "_SECONDS", 1)
    (tmp_path / "a.html").write_text(PAGE)
    (tmp_path / "b.html").write_bytes(HANGS)
    (tmp_path / "c.html").write_bytes(b"<html><body>" + b"<div>" * 30_000)
    (tmp_path / "d.html").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "e.html").write_bytes(b"")
    (tmp_path / "f.html").write_text(PAGE)
    found = items("html", limit=2_000_000, path=str(tmp_path))
    assert texts(found) == [TEXT_OF_PAGE, TEXT_OF_PAGE]
    assert reasons(found) == ["hangs_parser", "no_text", "no_text", "no_text"]


def test_a_parser_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trafilatura")
    with markup.Extractor("html") as extractor:
        assert extractor.text(PAGE.encode(), "a", 1).text == TEXT_OF_PAGE
        process = extractor._convert._process
        assert process is not None
        process.kill()
        process.wait()
        assert extractor.text(PAGE.encode(), "b", 1).reason == "kills_parser"
        assert extractor.text(PAGE.encode(), "c", 1).text == TEXT_OF_PAGE
        last = extractor._convert._process
    assert last is not None and last.returncode is not None


def record(
    kind: str, body: bytes, content_type: str, url: str = "http://a.b/c", http: str | None = "200 OK", length: int | None = None
) -> bytes:
    if http is not None:
        body = f"HTTP/1.1 {http}\r\nContent-Type: {content_type}\r\n\r\n".encode() + body
        content_type = f"application/http; msgtype={kind}"
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2024-05-01T00:00:00Z\r\n"
        f"WARC-Record-ID: <urn:uuid:1>\r\nContent-Type: {content_type}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body + b"\r\n\r\n"


RECORDS = [
    record("warcinfo", b"software: test", "application/warc-fields", http=None),
    record("request", b"", "text/html", http=None),
    record("response", PAGE.encode(), "text/html; charset=utf-8", url="http://a.b/page"),
    record("response", PAGE.encode(), "text/html", http="404 Not Found"),
    record("response", b"\x89PNG", "image/png"),
    record("response", b"plain text", "text/plain"),
    record("response", b"<html></html>", "text/html"),
    record("conversion", "converted naïve".encode(), "text/plain", http=None),
    record("response", b"x" * 50_000, "text/html"),
    record("response", b"5\r\nplain\r\n0\r\n\r\n", "text/plain\r\nTransfer-Encoding: chunked"),
    record("response", gzip.compress(b"unpacked"), "text/plain\r\nContent-Encoding: gzip"),
    record("response", gzip.compress(b"x" * 10_000_000), "text/plain\r\nContent-Encoding: gzip"),
    record("response", b"\0\xff\0\r\n", "application/http; msgtype=response", http=None),
    record("response", PAGE.encode(), "text/html", url="http://a.b/last"),
]


def test_web_archives(tmp_path: Path) -> None:
    pytest.importorskip("warcio")
    pytest.importorskip("trafilatura")
    paths = [tmp_path / name for name in ("a.warc", "b.warc.gz")]
    for path in paths:
        path.write_bytes(b"".join(gzip.compress(one) if path.suffix == ".gz" else one for one in RECORDS))
    both = items("warc", path=str(tmp_path))
    assert [item.origin.rpartition(":")[0] for item in both] == [str(path) for path in paths for _ in range(len(both) // 2)]
    for path, found in zip(paths, (both[: len(both) // 2], both[len(both) // 2 :]), strict=True):
        assert texts(found) == [TEXT_OF_PAGE, "plain text", "converted naïve", "plain", "unpacked", TEXT_OF_PAGE]
        assert reasons(found) == ["http_status", "not_a_page", "no_text", "enormous", "enormous", "http_status"]
        assert found[0].facts == {"url": "http://a.b/page", "date": "2024-05-01T00:00:00Z"}
        assert found[0].origin == f"{path}:3"


def test_the_encoding_that_a_server_named(tmp_path: Path) -> None:
    pytest.importorskip("warcio")
    pytest.importorskip("trafilatura")
    french = "Un café, l’été – à 5 €."
    page = PAGE.replace("naïve ", "").replace("Some prose", JAPANESE)
    (tmp_path / "a.warc").write_bytes(b"".join([
        record("response", french.encode("cp1252"), "text/plain; charset=windows-1252"),
        record("response", french.encode(), "text/plain; charset=windows-1252"),
        record("response", JAPANESE.encode("iso-2022-jp"), 'text/plain; Charset="ISO-2022-JP"'),
        record("response", page.encode("iso-2022-jp"), "text/html; charset=iso-2022-jp"),
        record("response", page.encode("cp932"), "text/html; charset=Shift_JIS"),
        record("response", page.replace("<head>", "<head><meta charset=koi8-r>").encode("cp932"), "text/html; charset=Shift_JIS"),
        record("response", "“①”".encode("cp932"), "text/plain; charset=Shift_JIS"),
        record("response", b"caf\xe9", "text/plain; charset=hex"),
        record("response", b"caf\xe9", "text/plain; charset=unicode_escape"),
    ]))  # fmt: skip
    found = items("warc", path=str(tmp_path / "a.warc"))
    assert texts(found)[:3] == [french, french, JAPANESE]
    assert texts(found)[3:] == [TEXT_OF_PAGE.replace("naïve ", "").replace("Some prose", JAPANESE)] * 3 + ["“①”"]
    assert reasons(found) == ["bad_utf8", "bad_utf8"]


def test_broken_web_archives(tmp_path: Path) -> None:
    pytest.importorskip("warcio")
    pytest.importorskip("trafilatura")
    good = record("conversion", b"good", "text/plain", http=None)
    cases = {
        "truncated": good + record("conversion", b"cut off here", "text/plain", http=None)[:-8],
        "long": good + record("conversion", b"short", "text/plain", http=None, length=10**12),
        "negative": good + record("conversion", b"short", "text/plain", http=None, length=-5),
        "garbage": good + b"\0\xff" * 5000,
        "no_warc": b"<html>this is none</html>",
        "headers": good + b"WARC/1.0\r\n" + b"A: b\r\n" * 200_000 + b"\r\n",
        "half.gz": gzip.compress(good) + gzip.compress(bytes(good * 50))[:60],
    }
    for name, data in cases.items():
        path = tmp_path / (f"{name.removesuffix('.gz')}.warc" + (".gz" if name.endswith(".gz") else ""))
        path.write_bytes(data)
        found = items("warc", path=str(path))
        assert texts(found)[:1] == ([] if name == "no_warc" else ["good"]), name
        assert reasons(found) == ["damaged_file"], name


LATEX = r"""
\documentclass{article}
\newcommand{\R}{\mathbb{R}} \def\half{\frac{1}{2}}
\title{On \emph{things}}
\begin{document}
\maketitle
We study $x\in\R$ and $\half$ here, 50\% of it. % a comment
\section{Intro}\label{sec:i}
As in \cite{foo,bar} and Section~\ref{sec:i}, na\"ive ``quotes'' --- a \textbf{bold} one.
\begin{equation}\label{eq:a}
 E = mc^2
\end{equation}
\begin{verbatim}
code % stays
\end{verbatim}
\begin{thebibliography}{9}\bibitem{foo} Foo.\end{thebibliography}
\end{document} not this
"""


def test_latex_becomes_text_with_its_formulas(tmp_path: Path) -> None:
    pytest.importorskip("pylatexenc")
    (tmp_path / "a.tex").write_text(LATEX)
    (tmp_path / "b.tex").write_bytes("\\section{Stra\xdfe} Grü\xdfe".encode("latin-1"))
    first, second = items("latex", path=str(tmp_path))
    assert first.text.splitlines() == [
        "# On things", "", r"We study $x\in\mathbb{R}$ and $\frac{1}{2}$ here, 50% of it.", "", "## Intro", "",
        "As in [foo,bar] and Section [sec:i], naïve “quotes” — a bold one.", "",
        r"\begin{equation}\label{eq:a}", " E = mc^2", r"\end{equation}", "", "```", "code % stays", "```",
    ]  # fmt: skip
    assert second.text == "## Straße\n\nGrüße"


PERCENT_SIGNS = [
    (r"See \url{http://x.org/a%20b} for it. % no text", "See <http://x.org/a%20b> for it."),
    (r"\href{http://x.org/c%3Dd}{A \emph{link} % no text" + "\n} more.", "A link <http://x.org/c%3Dd> more."),
    (r"A\footnote{\url{http://x.org/c%3Dd\#e}} more.", "A[<http://x.org/c%3Dd#e>] more."),
    (r"Now \verb|50% of x_1| and \verb*+%+ more.", "Now `50% of x_1` and `%` more."),
    (r"A \lstinline[language=C]{x % 2} and \mintinline{c}|y % 3| more.", "A `x % 2` and `y % 3` more."),
    (r"\nolinkurl{a%b} and \path{C:%d} more.", "a%b and C:%d more."),
    (r"A 50\% share, a line \\% no text" + "\nand more.", "A 50% share, a line and more."),
    ("One % \\begin{verbatim} \\verb|\nTwo % \\end{verbatim}\nThree", "One Two Three"),
]


def test_a_percent_sign_in_an_address_or_in_code_begins_no_comment(tmp_path: Path) -> None:
    pytest.importorskip("pylatexenc")
    for number, (source, _) in enumerate(PERCENT_SIGNS):
        (tmp_path / f"{number}.tex").write_text(f"\\begin{{document}}\n{source}\n\nThe end.\n\\end{{document}}\n")
    found = texts(items("latex", path=str(tmp_path)))
    assert [" ".join(one.split()) for one in found] == [f"{text} The end." for _, text in PERCENT_SIGNS]


def test_latex_is_read_in_the_encoding_that_it_names() -> None:
    russian = "Длинный абзац."
    for name, encoding in (("cp1251", "cp1251"), ("koi8-r", "koi8-r"), ("cp1251", "utf-8"), ("latin1", "utf-16"), ("latin1", "utf-32")):
        given = f"\\usepackage[{name}]{{inputenc}} {russian}"
        assert decoded_latex(given.encode(encoding)) == given, (name, encoding)
    assert decoded_latex("\\usepackage[ansinew]{inputenc} €".encode("cp1252")) == "\\usepackage[ansinew]{inputenc} €"
    assert decoded_latex("Grüße".encode("latin-1")) == "Grüße"
    with pytest.raises(ValueError, match="zero bytes"):
        decoded_latex("text".encode("utf-16-le"))


def test_latex_that_is_none_or_without_end(tmp_path: Path) -> None:
    pytest.importorskip("pylatexenc")
    bad = {
        "braces": "{" * 5000, "begin": r"\begin{a}" * 3000, "dollars": "$" * 5001, "verbatim": r"\begin{verbatim}" * 2000,
        "macros": "".join(rf"\newcommand{{\a{'b' * number}}}{{{'x' * 190}}}" for number in range(1, 20)) + r"\ab" * 100,
        "titles": r"\title{" * 3000, "defs": r"\def\a{" * 2000,
    }  # fmt: skip
    for name, text in bad.items():
        (tmp_path / f"{name}.tex").write_text(text)
    (tmp_path / "zlast.tex").write_text(LATEX)
    found = items("latex", limit=100_000, path=str(tmp_path))
    assert len(found) == len(bad) + 1
    assert found[-1].reason is None
    assert set(reasons(found)) <= {"no_text", "hangs_parser", "empty_text"}


def test_each_section_is_converted_by_itself() -> None:
    seen: list[str] = []
    to_text("start\n\\section{A} a\n\\subsection{B} b\n\\chapter*{C} c", lambda text: seen.append(text) or text)  # type: ignore[func-returns-value]
    assert seen == ["start\n", "\\section{A} a\n", "\\subsection{B} b\n", "\\chapter*{C} c"]


def notebook(*cells: dict[str, object]) -> str:
    return json.dumps({"cells": list(cells), "metadata": {"language_info": {"name": "python"}}, "nbformat": 4})


def test_notebooks_with_and_without_outputs(tmp_path: Path) -> None:
    outputs = [
        {"output_type": "stream", "text": ["1\n", "2\n"]},
        {"output_type": "execute_result", "data": {"text/plain": "3", "image/png": "AAAA"}},
        {"output_type": "error", "ename": "E", "evalue": "", "traceback": []},
    ]
    text = notebook(
        {"cell_type": "markdown", "source": ["# Title\n", "prose"]},
        {"cell_type": "code", "source": "print(1)\n", "outputs": outputs},
        {"cell_type": "code", "source": " \n", "outputs": []},
        {"cell_type": "raw", "source": "as it is"},
    )
    (tmp_path / "a.ipynb").write_text(text)
    (plain,) = items("notebook", path=str(tmp_path))
    assert plain.text == "# Title\nprose\n\n```python\nprint(1)\n```\n\nas it is"
    (whole,) = items("notebook", path=str(tmp_path), document_format="outputs")
    assert "```python\nprint(1)\n```\n\n```\n1\n2\n3\n```" in whole.text
    cells = [{"cell_type": "heading", "level": 2, "source": "Old"}, {"cell_type": "code", "input": "x", "outputs": []}]
    old = {"worksheets": [{"cells": cells}]}
    (tmp_path / "a.ipynb").write_text(json.dumps(old))
    assert texts(items("notebook", path=str(tmp_path))) == ["## Old\n\n```python\nx\n```"]


@pytest.mark.parametrize(
    ("level", "marks"),
    [(1, "#"), (6, "######"), (7, "######"), (10**9, "######"), (10**30, "######"), (0, "#"), (-5, "#"), ("x", "#"), (1e300, "#"),
     (None, "#"), (["a"], "#")],
)  # fmt: skip
def test_headings_of_notebooks_have_levels_of_markdown(tmp_path: Path, level: object, marks: str) -> None:
    (tmp_path / "a.ipynb").write_text(notebook({"cell_type": "heading", "level": level, "source": "Title"}))
    assert texts(items("notebook", path=str(tmp_path))) == [f"{marks} Title"]


def test_the_name_of_a_notebooks_language_takes_no_room(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": "x"}] * 500
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells, "metadata": {"language_info": {"name": "a" * 5000}}}))
    assert texts(items("notebook", limit=100_000, path=str(tmp_path))) == ["\n\n".join(["```\nx\n```"] * 500)]


def test_notebooks_that_are_none(tmp_path: Path) -> None:
    bad = [
        "{", "[]", "5", "{}", '{"cells": 5}', '{"cells": [5]}', '{"cells": [{"source": 5}]}', '{"cells": [{"source": "x"}]}', "[" * 100_000,
        '{"worksheets": null}', '{"cells": [{"source": {"a": 1}, "cell_type": "code"}]}', '{"cells": [], "metadata": []}',
    ]  # fmt: skip
    for number, text in enumerate(bad):
        (tmp_path / f"{number:02}.ipynb").write_text(text)
    found = items("notebook", limit=200_000, path=str(tmp_path))
    assert len(found) == len(bad)
    assert set(reasons(found)) == {"broken_json", "not_a_notebook", "empty_text"}


def test_metadata_before_markdown_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text('---\ntitle: "A page"\ndate: 2024-05-01\n---\n\nprose\n')
    (tmp_path / "b.md").write_bytes(b"---\r\ntitle: A page\r\n---\r\n# Its own\r\n")
    (tmp_path / "c.md").write_text("---\n\nonly a rule above\n")
    assert texts(items("markdown", path=str(tmp_path))) == ["# A page\n\nprose\n", "# Its own\n", "---\n\nonly a rule above\n"]


@pytest.mark.parametrize(
    "text",
    [
        "---\n\nProse between two rules.\n\n---\n\nmore\n", "---\nslide one text: hello\n---\nslide two\n", "---\n# Title\n---\ntext\n",
        "---\nkey: value\nA sentence.\n---\ntext\n", "---\n- a list\n- of two\n---\ntext\n", "---\n\n---\n",
    ],
)  # fmt: skip
def test_text_between_two_rules_is_no_metadata(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.md").write_text(text)
    assert texts(items("markdown", path=str(tmp_path))) == [text]


def test_metadata_of_all_forms_is_no_text(tmp_path: Path) -> None:
    block = 'layout: post\n"a-b.c": x\ntags:\n- a\n-\n  b: c\n# a comment\nabout: >\n  Two\n\tlines.\n\nlist: [1,\n  2\n]\nempty:\n'
    (tmp_path / "a.md").write_text(f"---\n{block}---\nprose\n")
    assert texts(items("markdown", path=str(tmp_path))) == ["prose\n"]


def test_compressed_pages(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with gzip.open(buffer, "wb") as out:
        out.write(b"prose")
    (tmp_path / "a.md.gz").write_bytes(buffer.getvalue())
    assert texts(items("markdown", path=str(tmp_path))) == ["prose"]
