"""Every command that the pages show is run on small data as it stands there, or is listed here with the reason why not."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from doc_pages import PAGES, ROOT, Command, blocks, commands, inline

from child_process import child_process
from lmworks.cli.habits import WORDS
from lmworks.cli.main import command_tree
from patience import PATIENCE
from started_server import wait_until_served

BIN = Path(sys.executable).parent
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONUNBUFFERED": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
}  # fmt: skip
STAGES = (
    "launch local", "preflight", "profile", "run", "corpus prepare", "tokenizer train", "shards build", "pretrain", "tune", "evaluate",
    "export",
)  # fmt: skip

# Not run, and why. What can be known of them without running is checked by the test named after the table.
LISTED = {
    "make assistant": "downloads a model and trains for ten minutes; tests/cli/test_assistant.py runs the recipe, slow",
    "lmworks chat runs/assistant": "talks to the model of make assistant; run by tests/cli/test_assistant.py, slow",
    "make quickstart": "installs and trains for ten minutes; the command in it is run here on small data",
    "make test": "is this",
    "make lint": "is run beside this",
    "make gpu PYTHON=python3": "needs a GPU; tests/gpu runs its checks at a small size, and .ci/run all of them",
    "make docs": "writes docs/recipe, which tests/recipe holds to the types",
    "make site": "installs Sphinx; tests/docs/test_site.py builds the site, slow",
    "make slow": "hours, with foreign engines",
    "make mutants": "hours of planted mistakes; tests/mutants/test_mutants.py plants one",
    "make doctor": "hours of runs with planted causes; tests/doctor/test_plants.py makes some",
    "make chaos": "an hour of runs that are killed",
    "make fuzz": "an hour of hostile input",
    ".venv/bin/python -m": "the test suite, or a generator of a page that its own test compares",
    "python -m torch.distributed.flight_recorder.fr_trace": "run by tests/launch/test_supervision.py on what ranks have left",
    "pip install": "changes the environment",
    "lmworks doctor runs/quickstart": "its exit code says what it found; tests/docs/test_doctor_page.py and tests/doctor run it",
    "lmworks doctor report.zip": "its exit code says what it found; run by tests/bundle/test_bundle.py",
    "lmworks evaluate --follow": "reads the sets of the recipe; tests/cli/test_follow_command.py runs it",
    "lmworks evaluate runs/quickstart --tasks arc-easy": "downloads the sets; tests/evaluate reads them, and tests/cli runs the command",
    "lmworks evaluate runs/quickstart --harness arc_easy": "downloads the sets; tests/evaluate and tests/cli run such tasks",
    "lmworks evaluate runs/quickstart --tasks gsm8k": "downloads the sets; tests/evaluate reads them, and tests/cli runs the command",
    "lmworks plan domain.yaml": "run by tests/cli/test_continue_pretraining.py on a small base model",
    "lmworks run domain.yaml": "run by tests/cli/test_continue_pretraining.py on a small base model",
    "lmworks compare runs/start runs/domain": "run by tests/cli/test_continue_pretraining.py on a small base model",
    "lmworks preflight recipes/quickstart.yaml --hosts local": "a minute; run by tests/preflight/test_preflight_hosts.py, slow",
    "lmworks health": "judges the machine that the tests are on; run by tests/health/test_health_command.py on recordings",
    "vllm serve": "run by tests/export/test_serving_docs.py where the engine is",
    "llama-server": "run by tests/export/test_serving_docs.py where the engine is",
    "llama-quantize": "run by tests/export/test_serving_docs.py where the engine is",
    "python -m sglang.launch_server": "needs an NVIDIA GPU",
    "python -m venv ENVIRONMENT": "the environment of llm-compressor takes 1 GB",
    "lmworks quantize MODEL": "run by tests/quantize/test_compressed.py where llm-compressor is",
    "lmworks quantize RUN": "run by tests/quantize/test_compressed.py where llm-compressor is",
    "lmworks init my-files": "run by tests/cli/test_init_command.py on files of many kinds",
    "lmworks run my-files.yaml": "run by tests/cli/test_init_command.py on what init wrote",
    "lmworks ablate qk-norm.yaml --jobs": "a quarter of an hour; tests/cli/test_ablate.py runs ablations on small data",
}

# Verbs that change nothing: a command of theirs that several pages show is run once.
READING = ("show", "plan", "advise", "chat", "serve")

# Any recipe becomes a model of some 100k parameters and a few steps of it; what a command sets itself comes after and wins.
SMALL = [
    "time=null", "threads=1", "corpus.max_validation_bytes=6KB", "tokenizer.vocab_size=768", "tokenizer.sample_bytes=300KB",
    "model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=16",
        "model.intermediate_size=64",
    "model.moe.n_routed_experts=4", "model.moe.moe_intermediate_size=16", "train.compile=false", "train.precision=fp32",
    "train.validation_bytes_per_domain=2000 bytes", "train.validate_every=50%", "train.save_every=50%", "train.sample_every=100%",
    "train.phases.general.sequence_length=64 tokens", "train.phases.general.global_batch_tokens=128 tokens",
        "train.phases.general.tokens=2Ki",  # 16 steps: a page shows batch 10
    "tune.sequence_length=256 tokens", "tune.global_batch_tokens=1Ki", "tune.tokens=4Ki",
    "evaluate.benchmarks=[]", "evaluate.task_items=1", "evaluate.references=false",
]  # fmt: skip
# Without the wheels: only text that every machine has, and little enough for one process.
QUICKSTART = [
    'corpus.sources=[{name: code, kind: stdlib, include: "[e-h]*.py", document_format: code, domain: code, language: code, '
    'license: PSF-2.0, max_bytes: 100KB}, {name: docs, kind: stdlib, include: "[a-e]*.py", document_format: docs, domain: docs, '
    "license: PSF-2.0, max_bytes: 100KB}]",
    "train.phases.general.mixture={code: 0.5, docs: 0.5}", "train.phases.anneal.mixture={docs: 1.0}",
    "train.phases.anneal.sequence_length=256 tokens", "train.phases.anneal.global_batch_tokens=512 tokens",
    "train.phases.anneal.tokens=2Ki",
    "tune.data=[{name: tasks, kind: tasks, tasks: [spell_backward], max_rows: 60}]", "evaluate.tasks=[spell_backward]",
]  # fmt: skip


def small(text: str) -> str:
    """The command, with small settings if it walks the stages of a recipe."""
    words = shlex.split(text)
    verb = next((stage for stage in STAGES if words[1 : 1 + len(stage.split())] == stage.split()), None)
    if words[0] != "lmworks" or verb is None or {"--tasks", "--harness"} & {*words}:  # then it is a model that is evaluated
        return text
    place = 2 + verb.count(" ")
    sets = SMALL + (QUICKSTART if words[place] == "recipes/quickstart.yaml" else [])
    return shlex.join([*words[: place + 1], *(word for value in sets for word in ("--set", value)), *words[place + 1 :]])


def run(text: str, folder: Path, stdin: str = "", server: subprocess.Popen[str] | None = None) -> str:
    """Run a command of a page in `folder`; returns what it printed. The `server` starts a command of ours, where the shell has no part."""
    words = shlex.split(small(text))
    if server is not None and words[0] == "lmworks" and not set("|>&;$*") & set(text) and "--install-completion" not in words:
        code, out, err = _served(server, words, folder, stdin)
    else:
        home = folder / "home"  # so that nothing of the user's is changed
        home.mkdir(exist_ok=True)
        own = ENVIRONMENT | {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "settings")}
        command = ["bash", "-c", f"{small(text)}\nexit $?"]  # two commands: of one alone bash becomes the command, which asks for its shell
        done = subprocess.run(command, cwd=folder, env=own, input=stdin, capture_output=True, encoding="utf-8", check=False)
        code, out, err = done.returncode, done.stdout, done.stderr
    assert code == 0, f"{text}\n{out[-2000:]}\n{err[-3000:]}"
    return out


def _served(server: subprocess.Popen[str], words: list[str], folder: Path, stdin: str) -> tuple[int, str, str]:
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as place:
        paths = {name: Path(place) / name for name in ("stdin", "stdout", "stderr")}
        for path in paths.values():
            path.write_text(stdin)
        for name in ("stdout", "stderr"):
            paths[name].write_text("")
        command = {"words": words, "folder": str(folder), **{name: str(path) for name, path in paths.items()}}
        server.stdin.write(json.dumps(command) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return code, paths["stdout"].read_text(), paths["stderr"].read_text()


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """What starts commands without their imports. The first command of all, in `folder`, is a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("commands_server.py"))]
    with child_process(command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        assert process.stdin
        process.stdin.close()
        assert process.wait(PATIENCE) == 0


def serves(text: str, folder: Path) -> None:
    """Start a server on a free port, ask for its page, and end it with Ctrl-C."""
    arguments = [*shlex.split(text), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with child_process(arguments, cwd=folder, env=ENVIRONMENT, **pipes) as process:
        url, said = wait_until_served(process)
        assert b"<html" in urllib.request.urlopen(f"{url}/", timeout=PATIENCE).read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 0, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout as a reader has it after `make quickstart`, and the texts of docs/own-data.md."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("recipes", "constraints.txt", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for page in PAGES:
        for block in blocks(page):
            if block.language == "yaml" and (name := re.fullmatch(r"# (\S+\.yaml)", block.lines[0])):
                (folder / name[1]).parent.mkdir(exist_ok=True)
                (folder / name[1]).write_text("\n".join(block.lines) + "\n")
            elif block.language == "jsonl":
                rivers = "\n".join(block.lines) + "\n"
            elif block.language == "json":
                conversation = json.loads("\n".join(block.lines))
    from pydoc_data.topics import topics

    for name in ("notes", "manuals"):
        (folder / "data" / name).mkdir(parents=True, exist_ok=True)
    texts = [topics[name] for name in sorted(topics)]
    (folder / "data/notes/all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[::2]))
    for number, text in enumerate(texts[1::2]):
        (folder / f"data/manuals/{number}.txt").write_text(text)
    paragraphs = [text for name in sorted(topics) for text in topics[name].split("\n\n") if len(text) > 80]
    labels = [{"text": text if score > 2 else text[::-1], "score": score} for text, score in zip(paragraphs, [1, 4] * 100, strict=False)]
    (folder / "data/labels.jsonl").write_text("".join(json.dumps(label) + "\n" for label in labels))
    (folder / "data/rivers.jsonl").write_text(rivers)
    question, answer = conversation["messages"]
    numbered = [{"messages": [question | {"content": f"{n}. {question['content']}"}, answer]} for n in range(60)]
    (folder / "data/answers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in numbered))
    assert "Now talk to it:  lmworks chat runs/quickstart" in run("lmworks run recipes/quickstart.yaml", folder)
    return folder


def listed(command: Command) -> str | None:
    return next((known for known in LISTED if command.text.startswith(known)), None)


def is_known(text: str) -> bool:
    """Whether `text` is a command that this test may run."""
    return shlex.split(text)[0] in ("lmworks", "head", "ls", "export") or text.startswith("pip config set ")


EVERY = [command for page in PAGES for command in commands(page)]


def test_every_command_is_run_or_listed() -> None:
    assert len(EVERY) > 30
    strange = [str(command) for command in EVERY if listed(command) is None and not is_known(command.text)]
    assert not strange, "run them in tests/docs/test_commands.py, or list them there with the reason:\n" + "\n".join(strange)
    unused = [known for known in LISTED if not any(command.text.startswith(known) for command in EVERY)]
    assert not unused, f"no page shows these any more: {unused}"


PAGES_WITH_COMMANDS = list(dict.fromkeys(command.page for command in EVERY if is_known(command.text)))


@pytest.mark.timeout(1800)
def test_the_commands_of_the_readme_work_in_their_order(folder: Path, server: subprocess.Popen[str]) -> None:
    _follow([ROOT / "README.md"], folder, server)


@pytest.mark.slow
def test_the_commands_of_all_pages_work_in_their_order(folder: Path, server: subprocess.Popen[str]) -> None:
    _follow(PAGES_WITH_COMMANDS, folder, server)


def _follow(pages: Sequence[Path], folder: Path, server: subprocess.Popen[str]) -> None:
    done: set[str] = set()  # commands that need not be run again
    for command in (command for page in pages for command in commands(page)):
        if listed(command) is not None or command.text in done:
            continue
        if command.text.split()[1] in READING:
            done.add(command.text)
        print(command)
        if command.text.startswith("lmworks serve"):
            serves(command.text, folder)
        elif command.text.startswith("lmworks chat"):
            assert run(command.text, folder, "Hello!\n", server).strip()
        else:
            printed = run(command.text, folder, server=server).strip()
            written = folder / command.text.partition(" > ")[2]
            assert printed or command.text.startswith("export ") or (written.is_file() and written.stat().st_size)


@pytest.mark.parametrize("command", [command for command in EVERY if listed(command)], ids=str)
def test_what_a_listed_command_names_is_there(command: Command, folder: Path, server: subprocess.Popen[str]) -> None:
    words = shlex.split(command.text)
    if words[0] == "make":
        done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stderr
    elif words[0] == ".venv/bin/python":
        assert importlib.util.find_spec(words[2]), f"there is no module {words[2]}"
        assert all((ROOT / word.partition("::")[0]).exists() for word in words[3:] if word.startswith("tests/"))
    elif words[:2] == ["pip", "install"]:
        assert (ROOT / words[words.index("-c") + 1]).is_file() if "-c" in words else True
        (extras,) = re.findall(r"\[([\w,]+)\]", command.text)
        project = (ROOT / "pyproject.toml").read_text()
        assert all(re.search(rf"^{extra} = ", project, flags=re.M) for extra in extras.split(","))
    elif words[:2] == ["lmworks", "ablate"]:
        assert "open" in run(f"{command.text} --list", folder, server=server)
    elif words[:3] == ["python", "-m", "venv"]:
        assert importlib.util.find_spec("venv")
    elif tests := re.findall(r"run by (tests/\S+\.py)", LISTED[listed(command) or ""]):
        assert all((ROOT / test).is_file() for test in tests)
    else:
        paths = [word for word in words if word.startswith("runs/")]
        assert paths
        written = paths[1:] if words[0] == "llama-quantize" else []
        for path in paths:
            there = (folder / path).parent if path in written else folder / path
            assert there.exists(), f"a finished run has no {path}"


HABITS = " ".join(WORDS.values()).split()  # words of other tools, which are answered with the command


def parts(words: list[str]) -> list[str]:
    """What is wrong with `lmworks ...`, where words in capitals, and *, stand for anything."""
    command, words = command_tree(), words[1:]
    if words and words[0].startswith("--"):
        return [] if words[0] in {option for one in command.params for option in one.opts} else [f"there is no option {words[0]}"]
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            known = words[0].isupper() or words[0] in {"*", *HABITS, "--install-completion", "--show-completion"}
            return [] if known else [f"there is no command {words[0]!r}"]
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts} | {"--help", "--debug"}
    return [f"there is no option {word}" for word in words if word.startswith("--") and word.split("=")[0] not in options]


def test_commands_in_the_prose_exist() -> None:
    found = [(page, line, code) for page in PAGES for line, code in inline(page) if code.startswith("lmworks ")]
    assert found
    wrong = [f"{page.name}:{line}: {code}: {fault}" for page, line, code in found for fault in parts(shlex.split(code))]
    assert not wrong, "\n".join(wrong)


OTHERS = ("serving.md", "coming-from.md")  # pages about other programs


def test_options_in_the_prose_exist() -> None:
    """An option in backticks belongs to some command of ours, or was recorded from another program; two pages are about others."""
    recorded = (Path(__file__).parents[1] / "recorded").glob("*.txt")
    known = {"--debug"}.union(*(re.findall(r"--[a-z][\w-]+", path.read_text(encoding="utf-8")) for path in recorded))

    def gather(command: object) -> None:
        known.update(option for parameter in getattr(command, "params", ()) for option in parameter.opts)
        for child in getattr(command, "commands", {}).values():
            gather(child)

    gather(command_tree())
    found = [(page, line, code) for page in PAGES if page.name not in OTHERS for line, code in inline(page) if code.startswith("--")]
    assert found
    wrong = [f"{page.name}:{line}: {code}" for page, line, code in found if code.split()[0] not in known]
    assert not wrong, "\n".join(wrong)


def test_yaml_of_the_pages_is_yaml() -> None:
    found = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]
    assert found
    assert all(isinstance(yaml.safe_load("\n".join(block.lines)) or {}, dict) for block in found)


def test_the_recipe_of_the_readme_is_whole(tmp_path: Path) -> None:
    from lmworks.recipe.load import load_recipe

    (recipe,) = [block for block in blocks(ROOT / "README.md") if block.language == "yaml"]
    (tmp_path / "mine.yaml").write_text("\n".join(recipe.lines))
    assert load_recipe(str(tmp_path / "mine.yaml")).recipe.train.phases
