"""`lmworks handover slime`: what another trainer needs, and the check of what comes back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmworks.cli.options import JsonOption
from lmworks.cli.output import console, print_json
from lmworks.errors import UserError

if TYPE_CHECKING:
    from lmworks.train.data.decontamination import Decontamination


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    group = typer.Typer(no_args_is_help=True, help="Hand a model over to another trainer.")
    group.callback()(lambda: None)
    group.command("slime")(slime)
    app.add_typer(group, name="handover")


def slime(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run directory with an export, or a model in Hugging Face format.")],
    prompts: Annotated[
        list[str] | None, typer.Option("--prompts", metavar="FILE", help="JSONL with prompts and labels, or a recipe with such tune.data.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="Directory to write, new or empty.")] = None,
    rm_type: Annotated[str, typer.Option("--rm-type", metavar="T", help="slime's reward for rows without their own.")] = "math",
    rm_url: Annotated[str | None, typer.Option("--rm-url", metavar="URL", help="Service of the reward remote_rm.")] = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="How often each prompt is asked.")] = 1,
    max_response: Annotated[int | None, typer.Option("--max-response", min=1, help="Longest answer in tokens; half the context.")] = None,
    back: Annotated[str | None, typer.Option("--back", metavar="DIR", help="Check a trained model that slime has converted.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the model, MODEL_ARGS, prompts and a run script for reinforcement learning with slime; or check the result with --back."""
    from lmworks.handover.recipes import prompt_files
    from lmworks.handover.slime import check_back, hand_over

    if back is not None:
        found = check_back(Path(model), Path(back))
        if as_json:
            print_json(found)
        else:
            console().print(f"{found['tensors']} tensors as in {model}, {found['changed']} of them changed; use it: start_from: {back}")
        return
    if not prompts or out is None:
        raise UserError("say which prompts to hand over, and where to: --prompts FILE --out DIR")
    made = hand_over(
        Path(model), prompt_files(prompts), Path(out), rm_type=rm_type, rm_url=rm_url, max_response=max_response, epochs=epochs,
        decontamination=_decontamination(Path(model), prompts),
    )  # fmt: skip
    if as_json:
        print_json(asdict(made) | {"directory": out})
        return
    terminal = console()
    for one in [*made.arguments, *(one for group in made.run_arguments.values() for one in group)]:
        terminal.print(f"  {one.name} {one.value or ''}  # {one.reason}")
    if made.contaminated is None:
        terminal.print("the prompts were not searched for items of the evaluation: no recipe with corpus.decontaminate is known")
    elif made.contaminated:
        terminal.print(f"{made.contaminated} of the prompts given hold an item of the evaluation")
    terminal.print(f"{made.tensors} tensors have names in both formats; {made.prompts} prompts; written to {out}. Start it: {out}/run.sh")


def _decontamination(model: Path, prompts: list[str]) -> Decontamination | None:
    """The search for items of the evaluation of the model's run, or else of the recipe that stands for the prompts; None without either."""
    from lmworks.evaluate.protection import protection
    from lmworks.progress import console as notes
    from lmworks.recipe.loading.load import load_recipe, load_resolved
    from lmworks.train.data.decontamination import Decontamination

    resolved, named = model / "resolved.json", next((name for name in prompts if name.endswith((".yaml", ".yml"))), None)
    recipe = load_resolved(resolved) if resolved.is_file() else load_recipe(named, []).recipe if named is not None else None
    if recipe is None or recipe.corpus.decontaminate is None:
        return None
    protected = protection(recipe)
    for name, reason in protected.unread.items():
        notes.print(f"the prompts cannot be searched for the items of {name}: {reason}", style="yellow")
    questions = {one.text.strip() for one in protected.questions}
    return Decontamination("--prompts", recipe, questions, protected.decontaminator(recipe.corpus.decontaminate.ngram), generated=False)
