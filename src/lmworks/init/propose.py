"""From a folder to a recipe: looks at the files, chooses stages, base model and budgets, and writes the recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from lmworks.errors import UserError
from lmworks.init import budgets as sizing
from lmworks.init.budgets import SMALLEST, Budgets
from lmworks.init.meaning import Found, understand
from lmworks.init.survey import Survey, survey
from lmworks.init.write import check, recipe_text
from lmworks.plan.automatic import this_machine
from lmworks.plan.budget import fit_time
from lmworks.recipe.derive import count_entries, default_run_dir
from lmworks.recipe.document import parse_file
from lmworks.recipe.gguf_model import find_gguf
from lmworks.recipe.load import find, load_cluster
from lmworks.recipe.parameters import count_active_parameters
from lmworks.recipe.scaling_laws import EPOCHS_AS_NEW, TOKENS_PER_PARAMETER, parse_size
from lmworks.recipe.schema.artifacts import Shards
from lmworks.recipe.weights import Weights, find_weights
from lmworks.tokenizer.opening import load
from lmworks.ui.amounts import amount, days

_SHORT, _LONG = 1800.0, 12 * 3600.0  # seconds on a CPU, to see that all works; on GPUs, a night
_DEFAULT_PARAMETERS = 134_515_008  # of the base model of the recipe `assistant`, SmolLM2-135M
_LEAST_SHARE = 0.005  # of the text; sources below it would be read far more often than others, or hardly at all
_USES = {"conversations": "tune", "preferences": "dpo", "labels": "dpo", "rewards": "grpo"}


@dataclass(frozen=True)
class Proposal:
    """What was seen, what it is good for, and the text of the recipe with its `name`; `notes` are for people."""

    survey: Survey
    found: list[Found]
    text: str
    name: str
    notes: list[str]


def propose(folder: str, start_from: str | None, time: float | None, cluster: str | None, output: Callable[[str], str]) -> Proposal:
    """Look at a folder, and propose a recipe for what it holds; `output` is the recipe's file by its name. Raises `UserError` if nothing
    in it can be trained on."""
    folder = folder if folder.strip("/") == "" else folder.rstrip("/")
    seen = survey(folder)
    found = understand(seen)
    notes: list[str] = []
    weights, start, start_note = _start(seen, start_from, notes)
    if not found:
        held = "; ".join(f"{number:,} {reason}" for reason, number in seen.unused.most_common(3)) or "it has no files"
        model = f"; there is a model: lmworks serve {start}" if start else ""
        model += f"; there is a tokenizer, but no text: {seen.tokenizers[0]}" if seen.tokenizers else ""
        raise UserError(f"{folder} holds nothing to train on ({held}){model}")
    where = load_cluster(cluster) if cluster else this_machine()
    budgets = Budgets(time or (_SHORT if where.on_cpu else _LONG), where)
    later = sorted({_USES[one.use] for one in found if one.use in _USES}, key=["tune", "dpo", "grpo"].index)
    documents = [one for one in found if one.use == "documents"]
    for one in [one for one in documents if one.text_bytes < _LEAST_SHARE * sum(other.text_bytes for other in documents)]:
        documents.remove(one)
        found.remove(one)
        seen.leave_out(f"{one.kind} files, which are less than {_LEAST_SHARE:.1%} of the text", one.path, one.files)
    if worked := [one for one in found if one.use == "rewards" and one.worked]:
        notes.append(f"{worked[0].path} has whole solutions, which may also be imitated: add it to tune.data")
    if sum(one.use == "labels" for one in found) and sum(one.use == "preferences" for one in found):
        notes.append("answers with labels are left out, since there are pairs; a recipe with dpo.loss kto takes both")
    texts = [text for one in documents for text in one.texts]
    encoder = _encoder(weights.tokenizer if weights is not None else None)
    if start is None and documents and (own := _tokenizer(seen, notes, bool(later))) is not None:
        budgets.tokenizer, budgets.vocab_size = own, count_entries(Path(own) / "tokenizer.json")
        encoder = _encoder(Path(own) / "tokenizer.json")
    elif seen.tokenizers and start is not None:
        notes.append(f"the tokenizer {seen.tokenizers[0]} is left out, since the weights of {start} need their own")
    budgets.bytes_per_token = sizing.measure_bytes_per_token(texts, budgets.vocab_size, encoder)
    budgets.text_tokens = round(sum(one.text_bytes for one in documents) / budgets.bytes_per_token)
    least = SMALLEST * TOKENS_PER_PARAMETER // EPOCHS_AS_NEW if start is None else sizing.FEWEST * 512
    pretrains = bool(documents) and (not later or budgets.text_tokens >= least)
    if documents and not pretrains:
        taught = "a model from random weights" if start is None else "the base model"
        notes.append(
            f"{len(documents)} {'source' if len(documents) == 1 else 'sources'} of documents left out: about "
            f"{amount(budgets.text_tokens)} tokens of text, and {amount(least)} are the least that teach {taught} anything"
        )
    if start is None and not pretrains:
        start = str(parse_file(find("assistant", "")).tree["start_from"])
        start_note = ("No base model was found, so this one of the package index is tuned: SmolLM2-135M-Instruct (Apache-2.0). To tune "
                      "another one: lmworks init --start-from FOLDER")  # fmt: skip
        budgets.base, budgets.bytes_per_token = _DEFAULT_PARAMETERS, sizing.BYTES_PER_TOKEN
    if start is not None and where.on_cpu:
        budgets.cluster = where.model_copy(update={"mfu": min(where.mfu, sizing.CPU_MFU)})
    if weights is not None:
        budgets.base = count_active_parameters(weights.model)
        budgets.context = int(weights.model.max_position_embeddings or budgets.context)
    if start is not None and pretrains and not sizing.fits(budgets):
        pretrains = False
        notes.append(f"the documents are left out: all weights of {start} with their optimizer state do not fit into the memory")
        if not later:
            raise UserError(
                f"{start} does not fit into the memory of {where.name} for further pretraining; take a smaller model or --cluster"
            )
    budgets.stages = (["pretrain"] if pretrains else []) + later
    name = _name(folder)

    def render() -> str:
        return recipe_text(name, folder, found, budgets, start, start_note, notes, output(name))

    if start is not None:
        conversations = sum(one.text_bytes for one in found if one.use == "conversations") / budgets.bytes_per_token
        sizing.choose_adapters(budgets, round(conversations))
        text = render()
        if not start.startswith("wheel:"):
            check(text)
    else:
        _choose_size(budgets, render)
        text = render()
        check(text)
    return Proposal(seen, found, text, name, notes)


def _start(seen: Survey, given: str | None, notes: list[str]) -> tuple[Weights | None, str | None, str]:
    """The base model: as asked, or the first in the folder that can be read."""
    if given is not None:
        return find_weights(Path(given)), given, "The base model, as asked."
    for path in sorted(seen.models, key=lambda path: (path.endswith(".gguf"), path)):
        try:
            folder = path if not path.endswith(".gguf") else str(find_gguf(Path(path)) or path)
            weights = find_weights(Path(folder))
        except UserError as error:
            seen.leave_out(f"models that cannot be read ({error})", path)
            continue
        others = [one for one in seen.models if one != path]
        if others:
            notes.append(f"{len(others)} more models are left out, the first {others[0]}; name one with --start-from")
        return weights, path, f"The base model found in the folder, {amount(count_active_parameters(weights.model))} active parameters."
    return None, None, ""


def _tokenizer(seen: Survey, notes: list[str], chats: bool) -> str | None:
    """The first tokenizer in the folder that a recipe can take as it is; if it `chats`, one with a chat template."""
    for path in sorted(seen.tokenizers):
        try:
            if not load(Path(path)).has_chat_template and chats:
                raise UserError("no chat template")
        except UserError as error:
            seen.leave_out(f"tokenizers that cannot be taken as they are ({error})", path)
            continue
        if others := [one for one in seen.tokenizers if one != path]:
            notes.append(f"{len(others)} more tokenizers are left out, the first {others[0]}; name one with tokenizer.path")
        return path
    return None


def _encoder(path: Path | None) -> Callable[[str], int] | None:
    if path is None or not path.is_file():
        return None
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(path))
    return lambda text: len(known.encode(text[:20_000], add_special_tokens=False).ids) * max(1.0, len(text) / 20_000)  # type: ignore[return-value]


def _choose_size(budgets: Budgets, render: Callable[[], str]) -> None:
    """The size that is compute-optimal for the time on the machines, or for the text where there is less. Raises `UserError` for too little
    text."""
    text, most = budgets.text_tokens, EPOCHS_AS_NEW * budgets.text_tokens
    if not budgets.tokenizer:
        budgets.vocab_size = sizing.vocabulary(budgets)
    budgets.size, budgets.tokens, budgets.base = amount(SMALLEST), TOKENS_PER_PARAMETER * SMALLEST, SMALLEST
    fitted, plan, chosen = fit_time(check(render()), budgets.cluster, sizing.TRAINING * budgets.seconds, choose_size=True)
    size, budgets.tokens = parse_size(str(fitted.recipe.size)), plan.tokens
    budgets.size_why = f"Parameters, {chosen.why}: {days(budgets.seconds)} on {budgets.cluster.name} ({budgets.cluster.device})."
    if plan.tokens > most:
        size = max(SMALLEST, int(float(f"{most / TOKENS_PER_PARAMETER:.2g}")))
        budgets.tokens = most
        budgets.size_why = (
            f"Parameters, as few as {EPOCHS_AS_NEW} readings of about {amount(text)} tokens are compute-optimal for "
            f"({TOKENS_PER_PARAMETER} per parameter, arXiv:2203.15556); the time would pay for {amount(plan.tokens)} tokens: more text "
            "allows a larger model."
        )
    budgets.size, wanted = amount(size), budgets.tokens
    budgets.tokens = TOKENS_PER_PARAMETER * size
    recipe = check(render()).recipe
    budgets.base = count_active_parameters(recipe.model)
    needed = 2 * sizing.FEWEST * int(recipe.train.phases[0].global_batch_tokens)  # twice: some text is held out, some dropped
    if needed > recipe.shards.max_epochs * text:
        budgets.readings = float(-(-needed // max(1, text)))
        if budgets.readings > (longest := Shards().max_epochs):
            raise UserError(
                f"about {amount(text)} tokens of text are too few to train on; {amount(needed / longest)} are the least: add "
                "text, or tune a base model on conversations"
            )
    budgets.tokens = max(wanted, needed)


def _name(folder: str) -> str:
    """A name for the run by the folder, of a run directory that is not there yet."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(os.path.abspath(folder))).strip("-._")[:60] or "mine"
    names = (base if number == 1 else f"{base}-{number}" for number in count(1))
    return next(name for name in names if not os.path.lexists(default_run_dir(name)))
