"""`lmworks init`: what it sees in folders, and recipes that `show`, `plan` and `run` accept."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from command import Lmworks

from base_models import write_model, write_tokenizer
from lmworks.corpus.read.listing import find_files
from lmworks.init.survey import MOST_FOLDERS
from lmworks.recipe.schema.corpus import Source
from lmworks.train.data.row_files import read_files

WORDS = ["the", "of", "and", "to", "in", "that", "have", "with", "pump", "valve", "key", "water", "pressure", "open", "clean", "day"]
ON = ("--cluster", "2-cores")  # nothing is measured
HOSTILE = ["-rf", "a\nb", "yaml: {x}", "#hash", "*glob*", "[br]", "http:", "~root", "%s", "tab\t", "\"quote'", "é", "日本", "\x1b[31mred",
           "null", "0x10", "- item", "!tag", "&anchor", "x\\y", "\x85nel", "  lead", "12"]  # fmt: skip
REAL = [folder / "shared" / "real" for folder in Path(__file__).resolve().parents[2:] if (folder / "shared" / "real").is_dir()]


@cache
def prose(seed: int, words: int = 300) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) + ("." if draw.random() < 0.1 else "") for _ in range(words)) + "."


def rows(path: Path, make: Callable[[int], object], count: int = 30) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(make(n)) + "\n" for n in range(count)), encoding="utf-8")


CHAT = {
    "messages": lambda n: {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": prose(n, 20)}]},
    "sharegpt": lambda n: {"conversations": [{"from": "human", "value": f"Say {n}"}, {"from": "gpt", "value": prose(n, 20)}]},
    "alpaca": lambda n: {"instruction": f"Describe day {n}", "input": "", "output": prose(n, 20)},
    "completion": lambda n: {"prompt": f"Day {n}?", "completion": prose(n, 20)},
}
PAIR = lambda n: {"prompt": f"What about {n}?", "chosen": prose(n, 10), "rejected": prose(-n - 1, 10)}  # noqa: E731
LABEL = lambda n: {"prompt": f"What about {n}?", "completion": prose(n, 10), "label": n % 2 == 0}  # noqa: E731
SUM = lambda n: {"question": f"What is {n} + 1?", "answer": str(n + 1)}  # noqa: E731


def init(lmworks: Lmworks, *arguments: object) -> tuple[dict[str, object], str]:
    """The recipe that init writes, and what it prints."""
    done = lmworks("init", *arguments, "-o", "out.yaml", *ON)
    assert done.code == 0, done.err
    return yaml.safe_load(Path("out.yaml").read_text(encoding="utf-8")), done.out


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def written_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_tokenizer(folder, "qwen")
    write_model(folder, 400, max_position_embeddings=512)
    return folder


@pytest.fixture
def model(written_model: Path, tmp_path: Path) -> Path:
    """A Hugging Face folder of a tiny model."""
    return shutil.copytree(written_model, tmp_path / "files" / "base")


def test_a_folder_with_everything_becomes_a_recipe_of_all_stages(lmworks: Lmworks, tmp_path: Path) -> None:
    for n in range(120):
        (tmp_path / "files" / "books").mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / "books" / f"{n}.txt").write_text(prose(n, 5000), encoding="utf-8")
    rows(tmp_path / "files" / "web" / "a.jsonl", lambda n: {"url": "https://x", "content": prose(1000 + n, 900)}, 100)
    (tmp_path / "files" / "web" / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "files" / "web" / "a.jsonl").read_bytes()))
    for form, make in CHAT.items():
        rows(tmp_path / "files" / "talk" / f"{form}.jsonl", make)
    rows(tmp_path / "files" / "pairs.json", PAIR)
    rows(tmp_path / "files" / "sums.ndjson", SUM)
    rows(tmp_path / "files" / "strange.jsonl", lambda n: {"x": n, "y": [n]})
    (tmp_path / "files" / "table.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    (tmp_path / "files" / ".env").write_text("TOKEN=hunter2", encoding="utf-8")
    recipe, said = init(lmworks, "files")
    sources = {one["name"]: one for one in recipe["corpus"]["sources"]}  # type: ignore[index]
    assert sources["books"] | {"license": ""} == {
        "name": "books", "kind": "text", "path": "files/books", "domain": sources["books"]["domain"], "language": "en", "license": "",
    }  # fmt: skip
    assert sources["web"]["text_key"] == "content" and sources["web"]["kind"] == "jsonl" and sources["web"]["path"] == "files/web"
    assert {one["path"].rpartition("/")[2] for one in recipe["tune"]["data"]} == {f"{form}.jsonl" for form in CHAT}  # type: ignore[index]
    assert recipe["dpo"]["data"][0]["path"] == "files/pairs.json"  # type: ignore[index]
    assert recipe["grpo"]["data"][0] | {"name": ""} == {"name": "", "kind": "files", "path": "files/sums.ndjson", "reward": "numeric"}  # type: ignore[index]
    assert "its columns are x, y" in said and "csv" in said and "strange.jsonl" in said and "hidden" in said
    assert "hunter2" not in said + Path("out.yaml").read_text(encoding="utf-8")
    assert lmworks("show", "out.yaml").code == 0
    planned = lmworks("plan", "out.yaml")
    assert planned.code == 0, planned.err
    assert "exists and is not overwritten" in lmworks("init", "files", "-o", "out.yaml", *ON).error


def test_a_model_in_the_folder_is_trained_further(lmworks: Lmworks, model: Path, tmp_path: Path) -> None:
    for n in range(30):
        (tmp_path / "files" / f"{n}.md").write_text(f"# Day {n}\n\n{prose(n, 2000)}", encoding="utf-8")
    rows(tmp_path / "files" / "chat.jsonl", CHAT["messages"])
    recipe, said = init(lmworks, "files")
    assert recipe["start_from"] == "files/base" and "model: files/base" in said
    assert [one["path"] for one in recipe["corpus"]["sources"]] == ["files/*"]  # type: ignore[index]
    assert recipe["train"]["phases"][0]["mixture"] == {"files": 1} and recipe["tune"]["epochs"] == 2  # type: ignore[index]
    assert recipe["tune"]["data"][0]["path"] == "files/*"  # type: ignore[index]
    planned = lmworks("plan", "out.yaml")
    assert planned.code == 0, planned.err
    assert "--start-from" not in said and "config.json" not in said  # the files of the model are nobody's rows
    assert "nowhere is no Hugging Face folder" in lmworks("init", "files", "--start-from", "nowhere", *ON).error


def test_budgets_that_no_measurement_corrects_are_careful_on_a_cpu(
    lmworks: Lmworks, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A recipe for existing weights has no `time`: its run is as long as its budgets."""
    from lmworks.init import budgets, propose

    assumed, honest = [], propose.recipe_text
    monkeypatch.setattr(propose, "recipe_text", lambda *given: (assumed.append(given[3].cluster.mfu), honest(*given))[1])
    rows(Path("files/chat.jsonl"), CHAT["messages"])
    init(lmworks, "files")
    assert {*assumed} == {budgets.CPU_MFU}
    assumed.clear()
    lmworks("init", "files", "-o", "gpu.yaml", "--cluster", "8xh100")
    assert min(assumed) > 0.2
    monkeypatch.setattr(budgets, "CPU_MFU", 1e-12)
    assert lmworks("init", "files", "-o", "short.yaml", *ON).code == 0
    said = " ".join(Path("short.yaml").read_text(encoding="utf-8").replace("#", " ").split())
    assert "20 steps are the fewest, and take longer than that" in said


def test_a_page_of_text_beside_conversations_is_left_out(lmworks: Lmworks, model: Path) -> None:
    Path("files/page.md").write_text(prose(1), encoding="utf-8")
    rows(Path("files/chat.jsonl"), CHAT["messages"])
    recipe, said = init(lmworks, "files")
    assert "tune" in recipe and not {"corpus", "train"} & recipe.keys()
    assert "1 source of documents left out" in " ".join(said.split())


def test_the_text_of_a_row_has_a_usual_name_or_is_most_of_it() -> None:
    from lmworks.init.meaning import _text_column

    assert _text_column({"notes": prose(1), "content": "A short text."}) == "content"
    assert _text_column({"id": "17", "notes": prose(1)}) == "notes"
    assert _text_column({"id": "17", "notes": "A short text."}) is None


@pytest.mark.parametrize(("name", "make", "section"), [("kto", LABEL, "dpo"), ("sums", SUM, "grpo"), ("pairs", PAIR, "dpo")])
def test_a_folder_of_one_kind(lmworks: Lmworks, model: Path, name: str, make: Callable[[int], object], section: str) -> None:
    rows(Path("files") / f"{name}.jsonl", make)
    recipe, _ = init(lmworks, "files")
    assert {"start_from", section} <= recipe.keys() and not {"tune", "dpo", "grpo"} - {section} & recipe.keys()
    assert (name != "kto") == ("loss" not in recipe[section])  # type: ignore[operator]
    planned = lmworks("plan", "out.yaml")
    assert planned.code == 0, planned.err


def test_links_within_the_folder_are_read_where_they_lead(lmworks: Lmworks, tmp_path: Path) -> None:
    """Once, by `init` and by the run: no source of links alone, and no rows or documents twice."""
    root = tmp_path / "files"
    for n in range(3):
        (root / "texts" / "b").mkdir(parents=True, exist_ok=True)
        (root / "texts" / f"t{n}.txt").write_text(prose(n, 2000), encoding="utf-8")
    (root / "texts" / "b" / "again.txt").symlink_to("../t0.txt")
    (root / "links").mkdir()
    (root / "links" / "t1.txt").symlink_to("../texts/t1.txt")
    (root / "links" / "out.txt").symlink_to(tmp_path / "out.txt")
    (tmp_path / "out.txt").write_text(prose(9), encoding="utf-8")
    (root / "texts" / "blob").write_text(prose(4), encoding="utf-8")
    (root / "links" / "named.txt").symlink_to("../texts/blob")
    recipe, said = init(lmworks, "files")
    assert [one["path"] for one in recipe["corpus"]["sources"]] == ["files/texts"]  # type: ignore[index]
    assert "3 files" in said and "links that lead out of the folder: 1, first files/links/out.txt" in said
    assert "links to files of the folder that have another ending: copy each to the name of its link: 1, first files/links/n" in said
    source = Source.model_validate({"name": "a", "kind": "text", "path": "files", "license": "mine"})
    assert [os.path.relpath(file.path, "files") for file in find_files(source, (".txt",))] == [
        "links/named.txt", "links/out.txt", "texts/t0.txt", "texts/t1.txt", "texts/t2.txt",
    ]  # fmt: skip
    done = lmworks("corpus", "prepare", "out.yaml", "--set", 'corpus.sources=[{name: texts, kind: text, path: files/links, license: mine}]')
    assert f"files/links/named.txt is a link to {root}/texts/blob, outside of the path of the source: name the target as a" in done.error


def test_hostile_names_and_files(lmworks: Lmworks, model: Path, tmp_path: Path) -> None:
    root = tmp_path / "files"
    for n, name in enumerate(HOSTILE):
        (root / name).mkdir()
        (root / name / f"{name}.txt").write_text(prose(n, 2000), encoding="utf-8")
        rows(root / name / f"{name}.jsonl", CHAT["messages"] if n % 2 else PAIR, 4)
    (root / "loop").symlink_to(root)
    (root / "-rf" / "up").symlink_to("..")
    (root / "etc").symlink_to("/etc")
    (root / "p.txt").symlink_to("/etc/passwd")
    (root / "broken.txt").symlink_to("nowhere")
    os.mkfifo(root / "fifo.txt")
    listener = socket.socket(socket.AF_UNIX)
    monkey = os.getcwd()
    os.chdir(root)  # the path of a socket is short
    listener.bind("sock.txt")
    os.chdir(monkey)
    for name in (b"bad\xff.txt", b"dir\xff"):
        path = os.path.join(os.fsencode(root), name)
        os.mkdir(path) if b"dir" in name else Path(os.fsdecode(path)).write_text(prose(1), encoding="utf-8")
    (root / "bin.txt").write_bytes(random.Random(0).randbytes(5000))
    (root / "empty.txt").touch()
    for name, text in (("b.jsonl", "{{{"), ("b.parquet", "PAR1"), ("b.jsonl.gz", "none"), ("deep.json", "[" * 100_000), ("y.gguf", "GGUF")):
        (root / name).write_text(text, encoding="utf-8")
    (root / "https-user-hunter2.csv").write_text("a", encoding="utf-8")
    recipe, said = init(lmworks, "files")
    listener.close()
    assert len(said.splitlines()) < 60 and "\x1b[31m" not in said
    for expected in ("pipes, sockets and devices: 3", "links that lead out of the folder: 2", "not UTF-8", "broken JSON", "damaged file"):
        assert expected in said, said
    paths = [one["path"] for key in ("tune", "dpo") for one in recipe[key]["data"]]  # type: ignore[index]
    assert sorted(paths) == sorted(f"files/{name}" for name in HOSTILE)
    assert lmworks("show", "out.yaml").code == 0
    planned = lmworks("plan", "out.yaml", "--set", "layout.tp=1")
    assert planned.code == 0, planned.err


def test_names_of_folders_that_look_like_options_or_homes(lmworks: Lmworks, model: Path) -> None:
    for name in ("-rf", "~root", "a b"):
        rows(Path(name) / "x.jsonl", CHAT["alpaca"])
        done = lmworks("init", "--start-from", "files/base", *ON, "--", name)
        assert done.code == 0, done.err
        written = done.out.rsplit("wrote ", 1)[1].partition(";")[0]
        path = yaml.safe_load(Path(written).read_text(encoding="utf-8"))["tune"]["data"][0]["path"]
        assert os.path.isdir(os.path.expanduser(path)), path
        assert lmworks("show", f"./{written}").code == 0


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_folder_holds_show_accepts_the_recipe(lmworks: Lmworks, model: Path, seed: int) -> None:
    draw = random.Random(seed)
    makers = [
        *CHAT.values(),
        PAIR,
        LABEL,
        SUM,
        lambda n: {"text": prose(n, 200)},
        lambda n: {"body": prose(n, 200)},
        lambda n: {"z": n},
        lambda n: n,
    ]
    for _ in range(draw.randrange(1, 40)):
        folder = Path("files").joinpath(*(draw.choice(HOSTILE) for _ in range(draw.randrange(3))))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (draw.choice(HOSTILE) + draw.choice([".txt", ".md", ".jsonl", ".json", ".py", ".bin", ".x"]))
        if path.suffix.startswith(".json"):
            rows(path, draw.choice(makers), draw.choice([0, 1, 5, 30]))
        else:
            path.write_text(prose(draw.randrange(100), draw.choice([0, 3, 300, 3000])), encoding="utf-8")
    done = lmworks("init", "files", "-o", "out.yaml", *ON)
    if done.code == 2:
        assert any(word in done.error for word in ("nothing to train on", "too few")), done.error
        assert not Path("out.yaml").exists()
        return
    assert done.code == 0, done.err
    assert lmworks("show", "out.yaml").code == 0


def test_too_little_nothing_and_no_folder(lmworks: Lmworks) -> None:
    Path("files").mkdir()
    assert "holds nothing to train on (it has no files)" in lmworks("init", "files", *ON).error
    Path("files/a.txt").write_text(prose(1), encoding="utf-8")
    assert "are too few to train on" in lmworks("init", "files", *ON).error
    assert "is a file; init looks at a folder" in lmworks("init", "files/a.txt", *ON).error
    assert (
        "s3://bucket/***" not in (said := lmworks("init", "s3://user:hunter2@host/x", *ON).error)
        and "hunter2" not in said
        and "a URL" in said
    )
    assert "--time" in lmworks("init", "files", "--time", "soon", *ON).error
    assert not list(Path().glob("*.yaml"))


def used(lmworks: Lmworks, folder: str) -> dict[str, dict[str, object]]:
    """What init finds in a folder, by the name of the file or the folder."""
    done = lmworks("init", folder, "-o", "counted.yaml", "--json", *ON)
    assert done.code == 0, done.err
    Path("counted.yaml").unlink()
    return {os.path.basename(one["path"]): one for one in json.loads(done.out)["used"]}


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("odd", [{"text": ""}, {"id": 5}, None])
def test_an_odd_row_at_the_beginning_costs_its_share_and_not_the_corpus(lmworks: Lmworks, ending: str, odd: object) -> None:
    """3,000 documents of 800 bytes, one of the first twenty without text; `None` is a line that is not JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = [odd if n == 4 else {"text": prose(n)[:800]} for n in range(3000)]
    written = "".join("{broken\n" if one is None else json.dumps(one) + "\n" for one in values)
    Path("files").mkdir()
    path = Path(f"files/a.{ending}")
    if ending == "parquet":
        pq.write_table(pa.table({"text": [(one or {}).get("text") for one in values]}), path)  # type: ignore[attr-defined]
    else:
        path.write_bytes(gzip.compress(written.encode()) if ending.endswith("gz") else written.encode())
    (one,) = used(lmworks, "files").values()
    off = 2.5 if ending.endswith("gz") else 1.07  # the compression is assumed
    assert 2999 * 0.93 / off <= one["rows"] <= 2999 * off, one  # type: ignore[operator]
    assert 2999 * 800 * 0.93 / off <= one["text_bytes"] <= 2999 * 800 * off, one  # type: ignore[operator]


def test_rows_count_by_what_they_mean(lmworks: Lmworks, model: Path) -> None:
    rows(Path("files/mixed/a.jsonl"), lambda n: {"z": n} if n % 4 == 0 else CHAT["sharegpt"](n), 4000)  # 2 MB at most: counted
    rows(Path("files/short/a.jsonl"), lambda n: {"z": n} if n % 4 == 0 else PAIR(n), 12)
    for n in range(40):  # more than are read
        rows(Path(f"files/many/{n}.jsonl"), (lambda n: {"z": n}) if n % 2 else CHAT["alpaca"], 30)
    found = used(lmworks, "files")
    assert (found["mixed"]["rows"], found["short"]["rows"]) == (3000, 9)
    assert 300 <= found["many"]["rows"] <= 900 and found["many"]["files"] < 30  # type: ignore[operator]


@pytest.mark.parametrize("place", ["", "tok"])
def test_a_tokenizer_is_offered_and_its_files_are_no_text(lmworks: Lmworks, tmp_path: Path, place: str) -> None:
    """Also where its files lie among the documents, whose source then names their ending."""
    folder = tmp_path / "files" / place
    folder.mkdir(parents=True)
    write_tokenizer(folder, "qwen")
    refused = lmworks("init", "files", *ON).error
    assert "holds nothing to train on" in refused and "there is a tokenizer" in refused, refused
    for name in ("adapter_config.json", "package.json", "model.safetensors.index.json", "trainer_state.json"):
        (folder / name).write_text(json.dumps({"description": prose(1)}), encoding="utf-8")
    (folder / "settings.json").write_text(json.dumps({"id": 3, "prompt_of_the_day": prose(1)}), encoding="utf-8")
    rows(tmp_path / "files" / "rows.jsonl", lambda n: {"text": prose(n, 900)}, 300)
    for n in range(60):
        (tmp_path / "files" / f"{n}.txt").write_text(prose(n, 3000), encoding="utf-8")
    recipe, said = init(lmworks, "files")
    assert recipe["tokenizer"] == {"path": str(Path("files") / place), "as_is": True}, said
    sources = {one["kind"]: one for one in recipe["corpus"]["sources"]}  # type: ignore[index]
    assert sources["text"]["path"] == "files" and "tune" not in recipe
    assert sources["jsonl"]["path"] == ("files/*" if place else "files/rows.jsonl") and "text_key" not in sources["jsonl"]
    assert "one object, whose longest text is no document" in said and "belong to a model, a tokenizer" in said
    assert lmworks("show", "out.yaml").code == 0
    planned = lmworks("plan", "out.yaml")
    assert planned.code == 0, planned.err


def test_rows_that_are_held_out_by_name_are_left_out_of_the_path_too(lmworks: Lmworks, model: Path) -> None:
    """By ending, by the first letters, one by one, or by their folder; the recipe reads what init has counted."""
    for name in ("ending/a.jsonl", "letters/train-00000-of-00002.jsonl", "letters/train-00001-of-00002.jsonl", "single/a.jsonl",
                 "single/z.jsonl", "folders/train/a.jsonl", "contest.jsonl", "latest.jsonl"):  # fmt: skip
        rows(Path("files") / name, CHAT["messages"], 30)
    held = ["ending/test.json", "letters/test-00000-of-00001.jsonl", "single/gsm8k_test.jsonl", "folders/dev/a.jsonl", "validation.jsonl"]
    for name in held:
        rows(Path("files") / name, CHAT["messages"], 7)
    found = lmworks("init", "files", "-o", "out.yaml", "--json", *ON)
    document = json.loads(found.out)
    unused = {one["reason"]: one["count"] for one in document["not_used"]}
    assert next(count for reason, count in unused.items() if "held out" in reason) == len(held), unused
    read = [row.origin.rpartition(":")[0] for one in document["used"] for row in read_files("init", one["path"])]
    assert len(read) == 8 * 30 == sum(one["rows"] for one in document["used"]) and not {*read} & {f"files/{name}" for name in held}


@pytest.mark.parametrize("many", [14, 40])
def test_held_out_folders_below_many_folders(lmworks: Lmworks, many: int) -> None:
    """As many folders are one source, whose path cannot leave out a file of the same name: the recipe names each file, or says so."""
    for n in range(many):
        rows(Path(f"files/{n}/a.jsonl"), CHAT["messages"], 5)
    rows(Path("files/test/a.jsonl"), CHAT["messages"], 5)
    recipe, said = init(lmworks, "files")
    paths = [one["path"] for one in recipe["tune"]["data"]]  # type: ignore[index]
    if many == 14:
        assert sorted(paths) == sorted(f"files/{n}/a.jsonl" for n in range(many))
    else:
        assert paths == ["files"] and "move files/test/a.jsonl and the like elsewhere" in said


def test_folders_of_held_out_rows_alone_do_not_count_as_many_folders(lmworks: Lmworks) -> None:
    """Twelve folders are twelve sources, whatever lies beside them that nothing trains on."""
    for n in range(MOST_FOLDERS):
        rows(Path(f"files/{n}/a.jsonl"), CHAT["messages"], 5)
    for n in range(3):
        rows(Path(f"files/held{n}/test.jsonl"), CHAT["messages"], 5)
    recipe, _ = init(lmworks, "files")
    assert sorted(one["path"] for one in recipe["tune"]["data"]) == sorted(f"files/{n}" for n in range(MOST_FOLDERS))  # type: ignore[index]


@pytest.mark.skipif(not REAL, reason="needs the real rows beside the checkout")
def test_real_rows(lmworks: Lmworks, model: Path) -> None:
    done = lmworks("init", REAL[0], "-o", "out.yaml", "--start-from", model, "--json", *ON)
    used = {os.path.basename(one["path"]): (one["use"], one["rows"]) for one in json.loads(done.out)["used"]}
    assert used == {
        "alpaca_en_demo.json": ("conversations", 999), "glaive_toolcall_en_demo.json": ("conversations", 300),
        "reason_tool_use_demo_50.jsonl": ("conversations", 50), "dpo_en_demo.json": ("preferences", 300),
        "kto_en_demo.json": ("labels", 300), REAL[0].name: ("documents", 1),
    }  # fmt: skip
    assert lmworks("show", "out.yaml").code == 0


@pytest.mark.slow
def test_recipes_run_to_the_end(lmworks: Lmworks, model: Path, tmp_path: Path) -> None:
    rows(tmp_path / "files" / "chat" / "a.jsonl", CHAT["messages"], 60)
    rows(tmp_path / "files" / "pairs" / "a.jsonl", PAIR, 60)
    rows(tmp_path / "files" / "sums" / "a.jsonl", SUM, 20)
    for n in range(20):
        (tmp_path / "files" / f"{n}.md").write_text(f"# Day {n}\n\n{prose(n, 1500)}", encoding="utf-8")
    init(lmworks, "files", "--time", "20s")
    done = lmworks("run", "out.yaml", "--set", "grpo.steps=1")
    assert done.code == 0, done.err
    assert lmworks("init", "files", "--time", "1min", "--start-from", "files/base").code == 0  # on this machine
    for path in (tmp_path / "files" / "base").iterdir():
        path.unlink()
    (tmp_path / "scratch").mkdir()
    for n in range(60):
        (tmp_path / "scratch" / f"{n}.txt").write_text(prose(n, 3000), encoding="utf-8")
    assert lmworks("init", "scratch", "--time", "1min").code == 0
    done = lmworks("run", "scratch.yaml")
    assert done.code == 0, done.err
