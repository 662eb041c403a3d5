"""What the stages of a run would refuse, looked for before the first one runs.

`CHECKS` is the one list: `lmworks run` raises the first refusal before any stage begins, `lmworks plan` shows all of them, for which a
check of several things yields a refusal for each. A refusal that only a later stage makes costs a user hours, so a new one gets a check
here; `tests/run/test_refusal_sites.py` walks every place in the source that raises a `UserError` and fails for one that is neither checked
here nor known to depend on what exists only later.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lmworks.errors import UserError, all_refusals, raise_first
from lmworks.host import machine
from lmworks.plan.budget import scale_budgets
from lmworks.plan.stages import StageData
from lmworks.recipe.schema.align import PreferenceData, RewardTask
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import ChatData
from lmworks.run.stages import STAGES

if TYPE_CHECKING:
    from lmworks.evaluate.protection import Protection
    from lmworks.tokenizer.tokenizer import Tokenizer

DataSet = ChatData | PreferenceData | RewardTask

RUN_BYTES = 4 << 20
"""Data files of a stage up to this size are read whole before a run, which takes seconds; of larger ones some rows, as plans do."""


class Before:
    """A run that has not begun: its recipe, its directory, and the folder of the recipe file, with what several checks need.

    `resuming` are stages that continue in their folder, where what they read is already; `most` bytes of a stage's data are read whole.
    proportions: the token budgets are to be scaled to the recipe's `time`, after which `settle_budget` checks what depends on them.
    """

    def __init__(
        self, recipe: Recipe, run_dir: Path, folder: Path, resuming: Sequence[str] = (), most: int = RUN_BYTES, proportions: bool = False
    ) -> None:
        self.recipe, self.run_dir, self.folder, self.resuming, self.most = recipe, run_dir, folder, resuming, most
        self.proportions = proportions
        self.shortest = scale_budgets(recipe, 0) if proportions else recipe
        """The recipe with the smallest budgets that it may get: a proportion may be smaller than a step."""
        self.data: dict[str, StageData] = {}
        self.notes: list[str] = []

    @cached_property
    def _aside(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory(prefix="lmworks-before-")

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the run will have; None if it is trained by the run, and has not been yet."""
        from lmworks.tokenizer import load
        from lmworks.tokenizer.train import train

        made = self.run_dir / "tokenizer"
        if self.recipe.tokenizer.path and not (made / "stage.json").is_file():
            place = Path(self._aside.name)
            train(self.recipe, place / "none", place / "tokenizer")
            return load(place / "tokenizer")
        return load(made) if (made / "tokenizer.json").is_file() else None

    @cached_property
    def protected(self) -> Protection:
        """The evaluation items, which are kept out of all data."""
        from lmworks.evaluate.protection import protection
        from lmworks.evaluate.sets.benchmarks import check_names

        check_names(self.recipe.evaluate.benchmarks)
        return protection(self.recipe)

    def read(self, stage: str, only: DataSet | None = None) -> None:
        """Read the data of a stage whose files are here. only: one of its sets, of which nothing is kept."""
        from lmworks.run.stage_data import read_stage, readable

        def protect():  # type: ignore[no-untyped-def]
            options = self.recipe.corpus.decontaminate
            texts = {one.text.strip() for one in self.protected.questions}
            return texts, self.protected.decontaminator(options.ngram_words) if options else None

        recipe = self.shortest
        if only is not None:
            recipe = recipe.model_copy(update={stage: recipe.later_stages[stage].model_copy(update={"data": [only]})})
        if readable(recipe, stage):
            found = read_stage(recipe, stage, self.tokenizer, self.run_dir / "corpus", protect, self.most)
            if only is None:
                self.data[stage] = found


Look = Callable[[Before], Iterable[UserError] | None]


@dataclass(frozen=True)
class Check:
    """A check of what a `stage` would refuse. `look` raises `UserError`, or yields one for each thing. here: it depends on the
    files, packages, memory or disk of this machine, so that it does not hold for a plan of another one."""

    stage: str
    look: Look
    here: bool = True

    def refusals(self, before: Before) -> Iterator[UserError]:
        try:
            yield from self.look(before) or ()
        except UserError as error:
            yield error


def look_ahead(before: Before, stages: Sequence[str]) -> Iterator[tuple[Check, UserError]]:
    """What these stages would refuse, each once. Later stages are checked though an earlier one is refused."""
    said: set[str] = set()
    for check in CHECKS:
        if check.stage not in stages:
            continue
        for error in check.refusals(before):
            if str(error) not in said:
                said.add(str(error))
                yield check, error


def require_possible(before: Before, stages: Sequence[str]) -> None:
    """Raise the first refusal of these stages."""
    raise_first(refusal for _, refusal in look_ahead(before, stages))


def _sources(before: Before) -> Iterator[UserError]:
    from lmworks.corpus.pipeline import left_out, refusals

    yield from refusals(before.recipe, before.folder)
    before.notes += left_out(before.recipe)


def _protected(before: Before) -> Iterator[UserError]:
    from lmworks.evaluate.protection import refusals_of_own

    return refusals_of_own(before.recipe)


def _tokenizer(before: Before) -> None:
    from lmworks.tokenizer.train import check

    check(before.recipe)
    before.tokenizer  # noqa: B018


def _imported(before: Before) -> Iterator[UserError]:
    from lmworks.io.files import sha256_file
    from lmworks.shards.build import check_imported

    tokenizer = before.tokenizer
    digest = None if tokenizer is None else sha256_file(tokenizer.directory / "tokenizer.json")
    return all_refusals(partial(check_imported, name, folder, digest) for name, folder in sorted(before.recipe.shards.imported.items()))


def _enough_text(before: Before) -> None:
    from lmworks.run.prediction import text_shortage

    if not _begun(before) and (missing := text_shortage(before.recipe, before.run_dir)):
        raise UserError(missing)


def _phases(before: Before) -> Iterable[UserError]:
    from lmworks.recipe.checks import phase_refusals

    return () if before.proportions else phase_refusals(before.recipe)


def _mixtures(before: Before) -> Iterator[UserError]:
    """Weights that are too small for any sequence, whatever text there is."""
    from lmworks.shards.mixture import Mixture

    optional = {name for source in before.recipe.corpus.sources if source.optional for name in source.outputs}
    for phase in before.recipe.train.phases:
        if optional & set(phase.mixture):
            continue  # without one of these, the others weigh more
        try:
            Mixture(phase.mixture)
        except UserError as error:
            yield UserError(f"train.phases.{phase.name}.{error}")


def _layout(before: Before) -> Iterator[UserError]:
    from lmworks.plan.automatic import machine_for
    from lmworks.plan.layout import problems, stage_problems
    from lmworks.plan.stages import later_phases, stages_as_phases

    recipe = stages_as_phases(before.recipe, before.data)
    if recipe.layout.auto:
        return
    cluster = machine_for(recipe)
    found = [problem for phase in recipe.train.phases for problem in problems(recipe, cluster, recipe.layout, phase)]
    with suppress(UserError):  # of a budget that is too small, which is refused where it is checked
        later = later_phases(recipe, before.data) if recipe.trains_base else []
        found += [problem for phase in later for problem in stage_problems(recipe.layout, phase)]  # whose batches need not divide
    for problem in found:
        yield UserError(f"layout: {problem}")


def _begun(before: Before) -> bool:
    from lmworks.checkpoint import listing

    return listing.has_checkpoints(before.run_dir / "checkpoints")


def _start(before: Before) -> None:
    from lmworks.run.start_weights import check_start

    if before.recipe.start_from is not None and not _begun(before):
        check_start(before.recipe)


def _adapters(stage: str) -> Look:
    def look(before: Before) -> None:
        import torch

        from lmworks.export.peft import class_before, read_peft, why_not_loaded
        from lmworks.model import Transformer
        from lmworks.model.lora import attach
        from lmworks.recipe.families.family import NoClass
        from lmworks.recipe.schema.model import is_adapter

        if (lora := before.recipe.loras.get(stage)) is None:
            return
        with torch.device("meta"):
            model = Transformer(before.recipe.model)
            try:
                attach(model, lora)
            except UserError as error:
                raise UserError(f"{stage}.{error}") from None
        state = {name: value for name, value in model.state_dict().items() if is_adapter(name)}
        if lora.init_from is not None and stage not in before.resuming:
            read_peft(Path(lora.init_from), state, before.recipe.model, class_before(before.recipe, stage), lora, None)
        if before.recipe.export.huggingface and stage == [*before.recipe.later_stages][-1]:  # its adapters are exported alone, too
            with suppress(NoClass):  # which the check of the export refuses
                if why := why_not_loaded(state, before.recipe.model, class_before(before.recipe, stage), lora):
                    before.notes.append(f"{stage}.lora: {why}")

    return look


def _rewards(before: Before) -> Iterable[UserError]:
    from lmworks.train.prompts import refusals

    return () if before.recipe.grpo is None else refusals(before.recipe)


def _generated(stage: str) -> Look:
    def look(before: Before) -> Iterator[UserError]:
        section = before.recipe.later_stages.get(stage)
        there = section.data if section is not None and stage not in before.resuming else ()
        return all_refusals(partial(one, before, data) for data in there)

    def one(before: Before, data: DataSet) -> None:
        from lmworks.corpus.read.conversations import create, generators_of
        from lmworks.train.data.row_files import read_dataset, read_files
        from lmworks.train.data.sets import task_share

        key = f"{stage}.data.{data.name}"
        if data.kind == "tasks":
            for generator in generators_of(data.tasks, before.recipe, key):
                create(generator, 1, 1, f"{key}.tasks")
            if isinstance(data, ChatData):
                task_share(data, before.recipe)
        elif data.kind in ("files", "huggingface") and not data.path:
            next(read_files(key, data.path) if data.kind == "files" else read_dataset(key, data.path, ""))

    return look


def _section(stage: str) -> Look:
    def look(before: Before) -> Iterable[UserError]:
        from lmworks.train.stage import stage_refusals

        return stage_refusals(before.shortest, stage) if stage in before.recipe.later_stages else ()

    return look


def _data(stage: str) -> Look:
    def look(before: Before) -> Iterator[UserError]:
        from lmworks.train.stage import check_steps

        if stage in before.recipe.later_stages and stage not in before.resuming:
            try:
                before.read(stage)
            except UserError as error:  # of the stage as a whole, or of one of its sets, beside which others may be at fault
                yield error
                for data in before.recipe.later_stages[stage].data:
                    each = all_refusals([partial(before.read, stage, data)])
                    yield from (other for other in each if f"{stage}.data.{data.name}" in str(other))
            scaled = before.proportions and stage == "tune" and before.recipe.tune is not None and before.recipe.tune.epochs is None
            if (found := before.data.get(stage)) is not None and not scaled:
                check_steps(before.recipe, stage, found.steps, found.read, found.held_out)

    return look


def _alerts(before: Before) -> Iterator[UserError]:
    from lmworks.watch.alert_targets import refusals

    return refusals(before.recipe.alerts)


def _packages(before: Before) -> Iterator[UserError]:
    from lmworks.metrics.log import refusals

    return refusals(before.recipe.metrics)


def _deepspeed(stage: str) -> Look:
    def look(before: Before) -> None:
        recipe = before.recipe
        if recipe.train.deepspeed is not None and (recipe.train.phases if stage == "pretrain" else stage in recipe.later_stages):
            from lmworks.parallel.zero_offload import require_library

            require_library(recipe.train.deepspeed)

    return look


def _evaluation(before: Before) -> Iterable[UserError]:
    if not (before.recipe.evaluate.benchmarks or before.recipe.evaluate.tasks):
        return ()
    from lmworks.evaluate.evaluate import refusals

    return refusals(before.recipe)


def _prompts(before: Before) -> Iterable[UserError]:
    wanted, tokenizer = before.recipe.evaluate, before.tokenizer
    if tokenizer is None or (wanted.prompts is None and wanted.questions == type(wanted)().questions):
        return ()
    from lmworks.train.observe.sampling import refusals

    return refusals(before.recipe, tokenizer)


def _export(before: Before) -> None:
    from lmworks.export.export import check

    check(before.recipe)


def _export_packages(before: Before) -> Iterator[UserError]:
    options = before.recipe.export
    for wanted, module, what, key in (
        (options.huggingface, "transformers", "checking an export", "huggingface"), (options.gguf is True, "gguf", "writing GGUF", "gguf"),
    ):  # fmt: skip
        if wanted and importlib.util.find_spec(module) is None:
            yield UserError(f"{what} needs {module}: pip install 'lmworks[export]', or set export.{key}=false")


def _memory(before: Before) -> Iterator[UserError]:
    """Refuses what cannot be had even if nothing else ran: state that persists between steps. The rest of the estimate is a warning."""
    from lmworks.plan.automatic import machine_for
    from lmworks.plan.memory import GIB
    from lmworks.plan.plan import make_plan

    if _begun(before) and not before.recipe.later_stages:
        return
    cluster = machine_for(before.recipe)
    try:
        phases = make_plan(before.recipe, "", cluster.model_copy(update={"memory_gib": 1e9}), data=before.data).phases
    except UserError:
        return  # a layout or a batch that is refused by its own check
    for phase in phases:
        held = phase.placed.memory
        fixed = sum(size for name, size in held.components.items() if name in STATE)
        if fixed > cluster.memory_gib * GIB:
            parts = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in held.components.items() if name in STATE and size)
            yield UserError(
                f"{phase.name} needs {fixed / GIB:,.1f} GiB for its state alone ({parts}), and {cluster.device} has "
                f"{cluster.memory_gib:g}: train low-rank adapters (lora), or a smaller model, or on a machine with more memory"
            )
        free = machine.available_memory() if cluster.on_cpu else cluster.memory_gib * GIB
        if held.total > free:
            before.notes.append(
                f"{phase.name} is predicted to need {held.total / GIB:,.1f} GiB of memory, and {free / GIB:,.1f} are available: set a "
                "smaller train.micro_batch_sequences, or train.activation_checkpointing=full"
            )


STATE = ("weights", "fp32 master", "gradients", "optimizer state")


def _disk(before: Before) -> None:
    from lmworks.run.prediction import require_disk, shortage

    require_disk(before.recipe, before.run_dir, before.data)
    if said := shortage(before.recipe, before.run_dir, before.data, most=True):
        before.notes.append(said)


_TRAINED = ("tune", "dpo", "grpo")
CHECKS = (
    *(Check(stage.name, _alerts) for stage in STAGES),
    Check("pretrain", _start),
    Check("pretrain", _phases, here=False),
    Check("pretrain", _mixtures, here=False),
    *(Check(stage, _section(stage), here=False) for stage in _TRAINED),
    *(Check(stage, _adapters(stage), here=False) for stage in _TRAINED),
    Check("grpo", _rewards),
    Check("export", _export, here=False),
    Check("export", _export_packages),
    Check("evaluate", _evaluation),
    Check("pretrain", _packages),
    *(Check(stage, _deepspeed(stage)) for stage in ("pretrain", *_TRAINED)),
    *(Check(stage, _generated(stage)) for stage in _TRAINED),
    Check("corpus", _protected),  # before the sources, among which these files are read, too, under another name
    Check("corpus", _sources),
    Check("shards", _enough_text),
    Check("tokenizer", _tokenizer),
    Check("shards", _imported),
    Check("evaluate", _prompts),
    *(Check(stage, _data(stage)) for stage in _TRAINED),
    Check("pretrain", _layout),
    Check("pretrain", _memory),
    Check("pretrain", _disk),
)
"""The quickest first; what needs the tokenizer after it, and what needs the data of a stage after these."""
