"""One small pass of everything that is measured during and after training, with random weights of the scaled-down model.

A set that is not there, a task that fails, a sandbox that does not start or a reward function that raises would otherwise be found when the
training is paid for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lmworks.errors import UserError
from lmworks.evaluate.generation.replies import Answerer
from lmworks.evaluate.generation.scoring import Reasoning
from lmworks.evaluate.generation.scoring import measure as measure_generation
from lmworks.evaluate.in_loop import make_evaluation
from lmworks.evaluate.records import EvaluationResults
from lmworks.evaluate.sets.scoring import measure
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.parallel.mesh import alone
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.preflight.check_result import CheckContext, CheckResult, MissingInput
from lmworks.preflight.small_model import small_recipe
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import load as load_tokenizer
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.prompts import try_rewards
from lmworks.weights.open import OpenModel, context_length

_ITEMS = 2  # of each set
_LITTLE = 1.0  # FLOPs of training, for which the form is chosen without questions
_HIDDEN, _HEAD = 64, 16


def dry_run(context: CheckContext) -> CheckResult:
    """Score a few items of every benchmark, generation set and task as `evaluate` does, those of `evaluate.every` as training does, and one
    reply with every reward of `grpo`."""
    recipe = context.recipe
    wanted = [one.name for one in recipe.evaluate.benchmarks] + [one.name for one in recipe.evaluate.tasks]
    rewards = [data.name for data in recipe.grpo.data] if recipe.grpo else []
    if not wanted and not rewards:
        return CheckResult("skip", "the recipe evaluates no benchmark and no task, and has no rewards")
    problems = dict(_rewards(recipe)) if rewards else {}
    texts = [f"rewards: {', '.join(rewards)}"] if rewards else []
    if wanted:
        directory = context.run_dir / "tokenizer"
        if not (directory / "tokenizer.json").exists():
            if not problems:
                raise MissingInput("there is no tokenizer yet", f"lmworks tokenizer train {context.name}, then this again")
        else:
            found, during = _evaluate(recipe, load_tokenizer(directory))
            problems |= {f"evaluate: {name}": why for name, why in found.unavailable.items()}
            texts.insert(0, f"{len(found.scores)} scores of {', '.join(wanted)}; {during} metrics during training")
    if problems:
        return CheckResult("fail", "; ".join(f"{name}: {why}" for name, why in problems.items()),
                           "get what is missing, or leave the set out; its scores would be missing after the run")  # fmt: skip
    return CheckResult("ok", "; ".join(texts))


@torch.no_grad()
def _evaluate(recipe: Recipe, tokenizer: Tokenizer) -> tuple[EvaluationResults, int]:
    """The scores of a model of the recipe's kind with random weights, and how many metrics training would write beside them."""
    rows = recipe.model.vocab_size
    assert rows
    small = small_recipe(recipe, rows, _HIDDEN, _HEAD)
    model = initialize(Transformer(small.model), recipe.seed).eval()
    options = recipe.evaluate
    benchmarks = [one.model_copy(update={"items": min(_ITEMS, one.items or _ITEMS), "samples": 1}) for one in options.benchmarks]
    subject = OpenModel(model, tokenizer, context_length(recipe, model), False, "preflight")
    found = measure(subject, benchmarks, _ITEMS, _LITTLE)
    answerer = Answerer(model, tokenizer, subject.chat)
    for generator in options.tasks:
        measure_generation(Reasoning(generator, _ITEMS), answerer, None, None, subject.name, found)
    if options.every == "never" or not recipe.train.phases:
        return found, 0
    few = recipe.model_copy(update={"evaluate": options.model_copy(update={"every_items": _ITEMS})})
    length = int(recipe.train.phases[0].sequence_length)
    evaluation = make_evaluation(few, tokenizer, length, 1, alone())
    return found, len(evaluation(ParallelModel([model], alone()))) if evaluation is not None else 0


def _rewards(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The rewards that fail on a reply, with the reason."""
    try:
        for name, reward in try_rewards(recipe):
            if reward.outcome == "failed":
                yield f"grpo.data.{name}", reward.detail
    except UserError as error:
        yield "grpo", str(error)
