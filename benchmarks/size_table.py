"""Prints the table of docs/sizing.md: what lmworks derives from the size of a dense model, and the smallest shipped cluster that trains it.

    python benchmarks/size_table.py

The tokens are compute-optimal. A cluster is large enough if the plan fits into its memory and takes at most 60 days.
"""

from __future__ import annotations

from lmworks.errors import UserError
from lmworks.plan.layout import describe
from lmworks.plan.plan import Plan, make_plan
from lmworks.recipe.load import load_cluster, load_recipe
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.amounts import amount, days

SIZES = ("125M", "350M", "1B", "3B", "7B", "13B", "30B", "70B", "200B")
CLUSTERS = ("8xh100", "64xh100", "8192xh800")
_LONGEST = 60 * 86_400


def smallest(recipe: Recipe) -> Plan | None:
    """The plan on the first cluster that is large enough."""
    for name in CLUSTERS:
        try:
            plan = make_plan(recipe, "", load_cluster(name))
        except UserError:
            continue
        if plan.seconds <= _LONGEST:
            return plan
    return None


def main() -> None:
    print("| size | layers x width | tokens | tokens per step | learning rate | cluster | layout | time | device-hours |")
    print("|---|---|---|---|---|---|---|---|---|")
    for size in SIZES:
        recipe = load_recipe("dense-125m", size=size).recipe
        model, phase = recipe.model, recipe.train.phases[0]
        plan = smallest(recipe)
        tokens = sum(int(one.tokens) for one in recipe.train.phases)
        row = [
            size, f"{model.num_hidden_layers} x {model.hidden_size:,}", amount(tokens), amount(int(phase.global_batch_tokens)),
            f"{recipe.optimizer.learning_rate:.2g}",
        ]
        if plan is None:
            row += ["larger than those shipped", "", "", ""]
        else:
            row += [plan.cluster.name, describe(plan.phases[0].placed.layout), days(plan.seconds), amount(plan.device_hours)]
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
