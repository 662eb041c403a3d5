"""The models that can be compared: runs, checkpoints and Hugging Face directories, folders of evaluations, and published tables.

The outcomes of a model that has none are computed and kept in a folder of their own, so that the next comparison finds them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lmworks import __version__
from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.evaluate import results_folder
from lmworks.evaluate.bits_per_byte import DocumentBits, document_bits, held_out
from lmworks.evaluate.evaluate import evaluate_model
from lmworks.evaluate.logprobs import BatchedLogProbs
from lmworks.evaluate.results import SUFFIXES, Answers, Results, names_in, read_results, read_table
from lmworks.evaluate.sets.benchmarks import CHOICE, GENERATION, contents
from lmworks.evaluate.sets.items import FORMS
from lmworks.evaluate.sets.scoring import training_flops
from lmworks.io import files
from lmworks.io.destinations import require_folder
from lmworks.io.run_layout import BASE, of_checkpoint, up_to
from lmworks.recipe.changes import canonical
from lmworks.recipe.load import load_resolved
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.ui.terminal import console
from lmworks.weights.open import open_model, weights_hash
from lmworks.weights.run_models import final_model

Texts = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Source:
    """One side of a comparison as it was named, the run that it belongs to, if any, and the folder of its evaluation, if there is one."""

    where: str
    label: str
    run: Path | None = None
    evaluation: tuple[Path, str] | None = None
    table: Path | None = None
    note: str = ""


@dataclass(frozen=True)
class Asked:
    """What models without outcomes are evaluated on: `benchmarks` (None: what the others were evaluated on), at most `items` of each."""

    benchmarks: Sequence[Benchmark] | None
    items: int
    cache: Path
    device: torch.device


def gather(names: Sequence[str], asked: Asked) -> list[Results]:
    """The results of each model, in order. Raises `UserError` for what cannot be compared."""
    if len(set(names)) < max(2, len(names)):
        raise UserError("a comparison needs two or more different models: lmworks compare A B")
    sources = _labelled([find(name) for name in names])
    texts = next((held_out(one.run / "corpus") for one in sources if one.run and _has_text(one.run)), {})
    found: dict[int, Results] = {}
    for index, source in enumerate(sources):
        if source.table is not None:
            found[index] = read_table(source.table)
        elif source.evaluation is not None and asked.benchmarks is None:
            found[index] = _with_note(read_results(*source.evaluation, source.label), source.note)
    for index, source in enumerate(sources):
        if index not in found:
            wanted = _wanted(sources, list(found.values()), asked)
            found[index] = _with_note(_compute(source, wanted, texts, asked), source.note)
    return [found[index] for index in range(len(sources))]


def find(where: str) -> Source:
    """What a name on the command line stands for."""
    path = Path(where).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UserError(f"{where} is no model, and a published table is one of {', '.join(SUFFIXES)}")
        return Source(where, path.stem, table=path)
    chosen = ""
    if not path.is_dir():  # the names of models have an @ too
        places = [at for at, letter in enumerate(where) if letter == "@" and Path(where[:at]).expanduser().is_dir()]
        if places:
            path, chosen = Path(where[: places[0]]).expanduser(), where[places[0] + 1 :]
    if not path.is_dir():
        raise UserError(f"{where} does not exist; give a run directory, a checkpoint, a Hugging Face folder, or a table of scores")
    if (path / "resolved.json").is_file():
        return _run(where, path, chosen)
    if (path / "results.json").is_file():
        return _evaluation(where, path, chosen)
    return _weights(where, path.resolve())


def _weights(where: str, path: Path) -> Source:
    """A checkpoint or a Hugging Face folder; opening it raises the errors."""
    if not listing.is_name(path.name):
        return Source(where, path.name)
    stage, run = of_checkpoint(path)
    label = f"{run.name}@{'' if stage is BASE else f'{stage.model}-'}{listing.step_of(path)}"
    return Source(where, label, run if (run / "resolved.json").is_file() else None)


def _run(where: str, run: Path, chosen: str) -> Source:
    name = run.resolve().name
    if chosen.isdecimal():
        return Source(where, f"{name}@{int(chosen)}", run)
    which = chosen or final_model(run)
    evaluation = run / "evaluate"
    if not (evaluation / f"outcomes-{which}.jsonl").is_file():
        return Source(where, f"{name}@{which}", run)
    if _is_stale(run, which):
        note = f"{evaluation} is of an earlier model, so it was evaluated again"
        return Source(where, f"{name}@{which}", run, note=note)
    return Source(where, f"{name}@{which}", run, (evaluation, which))


def _is_stale(run: Path, which: str) -> bool:
    """Whether the run was trained further after its evaluation."""
    path = run / "evaluate" / "stage.json"
    stamp = files.read_json(path) if path.is_file() else {}
    inputs = stamp.get("inputs") if isinstance(stamp, dict) else None
    names = [stage.input for stage in up_to(which)]
    return isinstance(inputs, dict) and any(name in inputs and inputs[name] != listing.content(run / name) for name in names)


def _evaluation(where: str, path: Path, chosen: str) -> Source:
    names = names_in(path)
    if not names:
        raise UserError(f"{path} has results but no outcomes of items; evaluate again with: lmworks evaluate MODEL --out {path}")
    if chosen not in ("", *names) or (not chosen and len(names) > 1):
        raise UserError(f"{path} has the results of {' and '.join(names)}; name one as {path}@{names[0]}")
    chosen = chosen or names[0]
    return Source(where, f"{path.resolve().name}@{chosen}" if len(names) > 1 else path.resolve().name, evaluation=(path, chosen))


def _labelled(sources: list[Source]) -> list[Source]:
    """Labels that differ: the whole name where two are equal."""
    labels = [one.label for one in sources]
    return [replace(one, label=one.where) if labels.count(one.label) > 1 else one for one in sources]


def _has_text(run: Path) -> bool:
    return (run / "corpus" / "validation").is_dir()


def _with_note(results: Results, note: str) -> Results:
    if note:
        results.notes.append(note)
    return results


def _wanted(sources: Sequence[Source], known: Sequence[Results], asked: Asked) -> list[Benchmark]:
    """What a model is to be evaluated on: the scores that the others have, in the same formulation; else what is asked for, or what the
    recipes of the runs list."""
    recipes = [load_resolved(one.run / "resolved.json") for one in sources if one.run]
    listed = [one for recipe in recipes for one in recipe.evaluate.benchmarks]
    by_name = {one.name: one for one in listed}
    if asked.benchmarks is not None:  # from the same data as the recipes
        given = [(one, {"form": one.form, "shots": one.shots, "items": asked.items}) for one in asked.benchmarks]
        listed = [by_name.get(one.name, one).model_copy(update=changes) for one, changes in given]
        by_name = {one.name: one for one in listed}
    found: dict[tuple[str, ...], Benchmark] = {}
    for results in known:
        for answers in results.scores.values():
            one = _formulated(by_name.get(answers.set), answers)
            if one is not None and (asked.benchmarks is None or answers.set in by_name):
                found.setdefault(tuple(answers.name.split("/")[:3]), one)
    if asked.benchmarks is not None:
        covered = {one.name for one in found.values()}
        return [*found.values(), *(one for one in listed if one.name not in covered)]
    if not found and not by_name:
        names = " and ".join(one.where for one in sources)
        raise UserError(f"there are no outcomes of {names}, and no recipe says what to evaluate; name the sets: --tasks arc-easy,piqa")
    return list(found.values()) or list(by_name.values())


def _formulated(listed: Benchmark | None, answers: Answers) -> Benchmark | None:
    """The benchmark that gives this score; None for one that cannot be asked again from its name."""
    parts = re.match(r"[^/]+/([a-z]+)/(\d+)-shot(?:/|\Z)", answers.name)
    if parts is None or (listed is None and answers.set not in (*CHOICE, *GENERATION)):
        return None
    form = {"form": parts[1]} if parts[1] in FORMS else {}
    items = answers.n if answers.items is not None else None
    return (listed or Benchmark(name=answers.set)).model_copy(update={"shots": int(parts[2]), "items": items, **form})


def _compute(source: Source, benchmarks: Sequence[Benchmark], texts: Texts, asked: Asked) -> Results:
    """Evaluate a model, or read what an earlier comparison has found."""
    key = {
        "weights": weights_hash(source.where), "benchmarks": contents(benchmarks), "items": asked.items,
        "texts": hashlib.sha256(canonical({domain: list(part) for domain, part in texts.items()})).hexdigest(),
        "device": str(asked.device), "lmworks": __version__,
    }  # fmt: skip
    name = re.sub(r"[^\w.@-]+", "-", source.label).strip("-.")[:60]
    out_dir = asked.cache / f"{name}-{hashlib.sha256(canonical(key)).hexdigest()[:12]}"
    if not (out_dir / "results.json").is_file():
        require_folder(out_dir, "--cache")
        _evaluate(source, benchmarks, texts, asked, out_dir)
    console.print(f"outcomes of {source.label}: {out_dir}", style="dim")
    return read_results(out_dir, names_in(out_dir)[0], source.label)


def _evaluate(source: Source, benchmarks: Sequence[Benchmark], texts: Texts, asked: Asked, out_dir: Path) -> None:
    opened = open_model(source.where, asked.device)
    recipe = load_resolved(source.run / "resolved.json") if source.run else None
    documents: Sequence[DocumentBits] = ()
    if texts:
        logprobs = BatchedLogProbs(opened.model, opened.context)
        label = f"{opened.name}: held-out text"
        documents = document_bits(texts, opened.tokenizer, opened.tokenizer.vocab_size, logprobs, opened.context, label)
    flops = training_flops(recipe, opened.model.config) if recipe else None
    results_folder.add(out_dir, evaluate_model(opened, benchmarks, asked.items, flops=flops, documents=documents))
