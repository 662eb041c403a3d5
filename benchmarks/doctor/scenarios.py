"""How the run of a plant is carried out: pretraining at once, stopped and resumed, a later stage from a base model, or several ranks.

Each function gets a `Case` in a process of its own and leaves a run folder. A refusal of lmworks (`UserError`) or a request to stop is a
way in which a run may end; the last line of it stands in `output.txt`, as a user would have seen it.
"""

# mypy: disable-error-code="func-returns-value"
# (calls in an expression, for their effect)
from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hooks
from faulty_rank import SLOW_FROM
from plants import Dose, Plant

import recipe as recipes
from lmworks.errors import UserError
from lmworks.recipe.load import load_recipe
from lmworks.run.runner import run_stages
from lmworks.ui.terminal import Interrupted
from recipe import SIZES, Size


@dataclass(frozen=True)
class Case:
    """A run: a plant in a dose, a size, a seed."""

    plant: Plant
    dose_name: str
    size_name: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.plant.name}/{self.dose_name}-{self.size_name}-{self.seed}"

    @property
    def dose(self) -> Dose:
        return self.plant.doses[self.dose_name]

    @property
    def size(self) -> Size:
        return SIZES[self.size_name]


def carry_out(case: Case, root: Path, folder: Path) -> str:
    """Make the run folder; returns how the run ended."""
    for name, arguments in case.dose.hooks:
        getattr(hooks, name)(**arguments)
    return SCENARIOS[case.plant.scenario](case, root, folder)


def _walk(path: Path, folder: Path, sets: list[str], last: str, allow: tuple[str, ...] = ()) -> str:
    """Run the stages up to `last`; returns how they ended."""
    try:
        resolved = load_recipe(path, [f"run_dir={folder}", *sets])
        run_stages(resolved, last=last, allow=allow, on_event=lambda event: None, resume_command="lmworks run run.yaml")
    except UserError as error:
        print(f"Error: {error}")
        return f"refused: {str(error)[:300]}"
    except Interrupted as stop:
        print(stop)
        return "interrupted"
    return "finished"


def _prepared(case: Case, root: Path, folder: Path) -> tuple[Path, list[str]]:
    path = recipes.prepare(root, case.size, case.dose.data)
    recipes.link(recipes.data_folder(root, case.size, case.dose.data), folder)
    return path, [f"train.seed={case.seed}", *case.dose.sets(case.size)]


def pretrain(case: Case, root: Path, folder: Path) -> str:
    path, sets = _prepared(case, root, folder)
    return _walk(path, folder, sets, "pretrain")


def resumed(case: Case, root: Path, folder: Path) -> str:
    """Stop at a step, change what is on the disk, and run again, in two processes. Options: `stop`: the step; `kill`: by SIGKILL; `leave`:
    not run again; `between`: what happens to the checkpoints; `factor`: on the rate, allowed by name; `hooks` and `after` of the second."""
    path, sets = _prepared(case, root, folder)
    options = case.dose.options
    number = signal.SIGKILL if options.get("kill") else signal.SIGINT
    code = in_child(lambda: (hooks.signal_at(options["stop"], number), _walk(path, folder, sets, "pretrain"))[1])
    if options.get("leave"):
        return code
    between = options.get("between")
    if between:
        CHANGES[between](folder)
    allow: tuple[str, ...] = ()
    if "factor" in options:
        sets, allow = [*sets, *case.size.rates(options["factor"])], ("optimizer.learning_rate", "optimizer.adam_learning_rate")
    for name, arguments in options.get("hooks", ()):
        getattr(hooks, name)(**arguments)
    return _walk(path, folder, [*sets, *options.get("after", ())], "pretrain", allow)


def in_child(work: Any) -> str:
    """Run `work` in a child process; returns what it returns, or how it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(work()).encode()[:4000])
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    return said or f"killed by signal {os.waitstatus_to_exitcode(status)}"


def _tensor_files(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step-*/data-*.bin"))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.unlink()
    path.write_bytes(data)


def _reset(folder: Path) -> None:
    from lmworks.run.checkpoint_commands import reset_optimizer

    reset_optimizer(folder, "base", None)


CHANGES = {
    "flip_newest": lambda folder: _flip(_tensor_files(folder)[-1]),
    "truncate_newest": lambda folder: os.truncate(_tensor_files(folder)[-1], 1000),
    "flip_all": lambda folder: [_flip(path) for path in _tensor_files(folder)],
    "reset_optimizer": _reset,
}


# Stages after pretraining.


def later(case: Case, root: Path, folder: Path) -> str:
    """A stage after pretraining, from the healthy model of the same size and seed."""
    path, stage, files = recipes.prepare(root, case.size, "base"), case.dose.options["stage"], _files(root)
    recipes.link(start_of(case, root), folder)
    sets = [f"train.seed={case.seed}", "checkpoints.keep_last=1"]
    if stage != "tune":
        sets.append(f"tune={json.dumps(_tune(ANSWERS, case.size, files))}")
    section = {"tune": _tune, "grpo": _grpo, "dpo": _dpo}[stage](case.dose.options, case.size, files)
    return _walk(path, folder, [*sets, f"{stage}={json.dumps(section)}"], stage)


ANSWERS = {"rate": 6, "replay": True, "steps": 150}
"""How the model is tuned that preferences and rewards start from: it ends most of its answers."""


def start_of(case: Case, root: Path) -> Path:
    """The folder of a healthy run with its checkpoints, made once: pretrained, and tuned where another stage than tuning follows."""
    path, size, files = recipes.prepare(root, case.size, "base"), case.size, _files(root)
    sets = [f"train.seed={case.seed}", "checkpoints.keep_last=1"]
    folder = root / "bases" / f"{size.name}-{case.seed}"
    _once(folder, recipes.data_folder(root, size, "base"), path, sets, "pretrain")
    if case.dose.options["stage"] == "tune":
        return folder
    tuned = folder.with_name(f"{folder.name}-tuned")
    _once(tuned, folder, path, [*sets, f"tune={json.dumps(_tune(ANSWERS, size, files))}"], "tune")
    return tuned


def _once(folder: Path, before: Path, path: Path, sets: list[str], stage: str) -> None:
    done, key = folder / "done", json.dumps([path.read_text(encoding="utf-8"), sets, before.name])
    if done.exists() and done.read_text(encoding="utf-8") == key:
        return
    shutil.rmtree(folder, ignore_errors=True)
    recipes.link(before, folder)
    ended = in_child(lambda: _walk(path, folder, sets, stage))
    assert ended == "finished", ended
    done.write_text(key, encoding="utf-8")


def _files(root: Path) -> Path:
    """Conversations, pairs and prompts of sums, made once."""
    folder = root / "data" / "later"
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(3)
    sums = [(a, b) for a in range(20) for b in range(20)]
    draw.shuffle(sums)

    def write(name: str, rows: list[Any]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    ask, say = (lambda a, b: f"What is {a} + {b}?"), (lambda a, b: f"{a} + {b} is {a + b}.")
    write(
        "chats.jsonl",
        [{"messages": [{"role": "user", "content": ask(a, b)}, {"role": "assistant", "content": say(a, b)}]} for a, b in sums],
    )
    for name, question, answer in (("end_masked", False, True), ("all_trained", True, True), ("inverted", True, False)):
        write(f"{name}.jsonl", [
            {"segments": [{"text": f"User: {ask(a, b)}\nAssistant: ", "label": question}, {"text": say(a, b) + "\n", "label": answer}]}
            for a, b in sums
        ])  # fmt: skip
    write("pairs.jsonl", [
        {"prompt": ask(a, b), "chosen": say(a, b), "rejected": f"No idea, perhaps {draw.randrange(40)} or {draw.randrange(40)}."}
        for a, b in sums
    ])  # fmt: skip
    write("prompts.jsonl", [{"prompt": ask(a, b), "answer": str(a + b)} for a, b in sums])
    (folder / "done").touch()
    return folder


def _tune(options: dict[str, Any], size: Size, files: Path) -> dict[str, Any]:
    wrong = options.get("wrong")
    section: dict[str, Any] = {
        "data": [{"name": "sums", "kind": "files", "path": str(files / f"{wrong or 'chats'}.jsonl")}],
        "tokens": f"{options.get('steps', 60) * size.batch} tokens", "global_batch_tokens": f"{size.batch} tokens",
        "sequence_length": f"{size.length} tokens",
        "learning_rate": size.rate * 0.2 * options.get("rate", 1),
    }  # fmt: skip
    return section | ({"replay": {"fraction": 0.3}} if options.get("replay") else {})


def _dpo(options: dict[str, Any], size: Size, files: Path) -> dict[str, Any]:
    return {
        "data": [{"name": "sums", "kind": "files", "path": str(files / "pairs.jsonl")}], "sequence_length": f"{size.length} tokens",
        "pairs_per_step": 16, "epochs": 4.0, "learning_rate": size.rate * 0.03 * options["rate"], "beta": options["beta"],
        "validation_fraction": 0.1,
    }  # fmt: skip


REWARDS = {
    "own": "return float(len(set(answer)) >= 9)",
    "hard": "return float(len(set(answer)) >= 9) if {draw} else 0.0",
    "trivial": "return float(len(set(answer)) >= 9) if {draw} else 1.0",
    "cut": "return float(len(set(answer)) >= 9)",
    "raising": "if not ({draw}):\n        raise KeyError('answer_key')\n    return float(len(set(answer)) >= 9)",
}


def _grpo(options: dict[str, Any], size: Size, files: Path) -> dict[str, Any]:
    """`share` of the prompts have no signal: by the text of the prompt, so that all answers of a group have the same fate."""
    kind, share = options["reward"], options["share"]
    draw = f"(sum(map(ord, str(prompt))) * 2654435761 % 1000) >= {int(1000 * share)}"
    reward = files / f"reward-{kind}-{share}.py"
    reward.write_text(f"def reward(prompt, answer, row):\n    {REWARDS[kind].format(draw=draw)}\n", encoding="utf-8")
    most = {0.8: 6, 0.98: 3, 1.0: 2}[share] if kind == "cut" else 24
    return {
        "data": [{"name": "sums", "kind": "files", "path": str(files / "prompts.jsonl"), "reward": "python", "file": str(reward)}],
        "group_size": 4, "prompts_per_step": 4, "steps": 40, "temperature": 0.5, "max_new_tokens": most,
        "sequence_length": f"{size.length} tokens",
        "learning_rate": size.rate * 0.02, "validation_prompts": 8,
    }  # fmt: skip


# Ranks.

_STEPS = {"slow": 2 * SLOW_FROM, "slow from the start": SLOW_FROM}

def ranks(case: Case, root: Path, folder: Path) -> str:
    """Two ranks with the launcher, one of which becomes or is slow, hangs, is killed, or runs out of the memory of its control group."""
    from lmworks.launch import launcher
    from lmworks.launch.torchrun import CountRange

    path, sets = _prepared(case, root, folder)
    options = case.dose.options
    sets = [*sets, case.size.budget(_STEPS.get(options["fault"], 40)), "launch.timeout=15 s", "launch.max_restarts=1"]
    os.environ["LMWORKS_DOCTOR_FAULT"] = json.dumps(
        {"kind": options["fault"], "dose": options["dose"], "ledger": str(folder / "ledger.jsonl")}
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(Path(sys.modules["lmworks"].__file__ or "").parents[1])])
    if options["fault"] == "oom":
        hooks.memory_limit(2 << 30)
    resolved = load_recipe(path, [f"run_dir={folder}", *sets])
    words = [f"run_dir={folder}", *sets]
    work = ["pretrain", str(path), *(word for one in words for word in ("--set", one))]
    made = launcher.launch_local(resolved.recipe, folder, CountRange.parse("2"), work)
    return f"exit code {replace(made, module='faulty_rank').run()}"


SCENARIOS = {"pretrain": pretrain, "resumed": resumed, "later": later, "ranks": ranks}
