"""Mutants drawn by seed from all that cosmic-ray's operators make of some modules: signs, comparisons, numbers, decorators, loops.

cosmic-ray (https://cosmic-ray.readthedocs.io) is used as a library: it would change the working tree and start an interpreter per mutant.
What changes only an annotation, which is never evaluated, is not a mutant.
"""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass

from mutants.mutant import ROOT


@dataclass(frozen=True)
class Target:
    """Modules, as patterns below src/lmworks, and the tests that are to find mistakes in them, the most probable first."""

    modules: str
    tests: tuple[str, ...]


def _tests(names: str) -> tuple[str, ...]:
    return tuple(f"tests/{name}" for name in names.split())


TARGETS = {
    "shards/order": Target("shards/order.py shards/epochs.py shards/mixture.py", _tests(
        "shards/test_permute.py shards/test_order.py shards/test_mixture.py shards/test_timeline.py shards/test_mixture_changes.py shards"
    )),
    "optim": Target("optim/*.py", _tests(
        "optim/test_schedules.py optim/test_groups.py optim/test_muon.py optim/test_adamw.py optim train/test_step.py"
    )),
    "checkpoint": Target("checkpoint/*.py", _tests("checkpoint/test_checkpoints.py checkpoint cli/test_checkpoint_commands.py")),
    "train/step": Target("train/step.py", _tests(
        "train/test_step.py train/test_ranks.py train/test_average.py train/test_bad_steps.py train/test_ewc.py train/test_resume.py"
    )),
    "losses": Target(
        "model/loss.py inference/sampling.py model/mtp.py train/grpo.py train/dpo.py",
        _tests(
            "inference/test_penalties.py model/test_mtp.py model/test_layers.py model/test_transformer.py train/test_dpo.py "
            "train/test_grpo.py parallel/test_weighted_loss.py inference model"
        ),
    ),
    "statistics": Target("ablate/welch.py ablate/contrast.py ablate/verdict.py ablate/conclusions.py ablate/quality.py "
        "evaluate/comparison.py evaluate/results.py evaluate/compared_models.py evaluate/statistics.py ladder/fit.py", _tests(
        "ablate evaluate/test_differences.py evaluate/test_score_statistics.py ladder/test_fit.py evaluate/test_comparison.py"
    )),
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A mutant of cosmic-ray: the `occurrence`th place of an operator in a module. `path` is below the root of the repository."""

    name: str
    path: str
    mutated: str


def sample(target: str, count: int, seed: int) -> list[Drawn]:
    """`count` different mutants of a target, or all that there are, in an order that the seed decides."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    places = []
    for path in sorted({path for pattern in TARGETS[target].modules.split() for path in (ROOT / "src" / "lmworks").glob(pattern)}):
        nodes = list(ast_nodes(get_ast(path.read_text(encoding="utf-8"))))
        for name in sorted(operator_names()):
            if get_operator(name).arguments():
                continue  # which variable to replace would have to be named
            operator = get_operator(name)()
            positions = [begin for node in nodes for begin, _ in operator.mutation_positions(node)]
            places += [(path, name, number, begin) for number, begin in enumerate(positions)]
    random.Random(seed).shuffle(places)
    found: list[Drawn] = []
    for path, name, number, (line, column) in places:
        if len(found) == count:
            break
        source = path.read_text(encoding="utf-8")
        mutated = mutate_code(source, get_operator(name)(), number)
        if mutated is not None and (changed := _evaluated(mutated)) is not None and changed != _evaluated(source):
            short = name.rpartition("/")[2]
            place = f"{path.relative_to(ROOT / 'src' / 'lmworks')}:{line}:{column}"
            found.append(Drawn(f"{place} {short} {number}", str(path.relative_to(ROOT)), mutated))
    return found


class _Unannotated(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        if isinstance(node.annotation, ast.BinOp):
            node.annotation = ast.Constant(None)
        return node


def _evaluated(source: str) -> str | None:
    """What of a module is evaluated, or None if it is no module."""
    try:
        return ast.dump(_Unannotated().visit(ast.parse(source)))
    except SyntaxError:
        return None
