"""Mutants drawn by seed from all that cosmic-ray's operators make of some modules: signs, comparisons, numbers, decorators, loops.

cosmic-ray (https://cosmic-ray.readthedocs.io) is used as a library: it would change the working tree and start an interpreter per mutant.
What changes only an annotation, which is never evaluated, is not a mutant.
"""

from __future__ import annotations

import ast
import functools
import random
from dataclasses import dataclass

from mutants.mutant import ROOT


@dataclass(frozen=True)
class Target:
    """Modules, as patterns below src/lmworks, and the files or folders of tests that are to find mistakes in them."""

    modules: str
    tests: tuple[str, ...]


def _tests(names: str) -> tuple[str, ...]:
    return tuple(f"tests/{name}" for name in names.split())


TARGETS = {
    "shards/order": Target("shards/order.py shards/epochs.py shards/mixture.py", _tests("shards run/test_changed_order.py")),
    "optim": Target("optim/*.py", _tests("optim train/test_step.py")),
    "checkpoint": Target("checkpoint/*.py", _tests("checkpoint cli/test_checkpoint_commands.py run/test_copy.py")),
    "train/step": Target("train/step.py", _tests(
        "train/test_step.py train/test_ranks.py train/test_average.py train/test_bad_steps.py train/test_ewc.py train/test_resume.py "
        "train/test_grpo.py"
    )),
    "losses": Target(
        "model/loss.py inference/sampling.py model/mtp.py train/grpo.py train/dpo.py",
        _tests("inference model train/test_dpo.py train/test_grpo.py parallel/test_weighted_loss.py"),
    ),
    "statistics": Target("ablate/welch.py ablate/contrast.py ablate/verdict.py ablate/conclusions.py ablate/quality.py "
        "evaluate/comparison.py evaluate/results.py evaluate/compared_models.py evaluate/statistics.py ladder/fit.py", _tests(
        "ablate evaluate/test_differences.py evaluate/test_score_statistics.py ladder/test_fit.py evaluate/test_comparison.py "
        "cli/test_compare_command.py"
    )),
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A mutant of cosmic-ray: the `occurrence`th place of an operator in a module. `path` is below the root of the repository."""

    name: str
    path: str
    source: str
    mutated: str


def sample(target: str, count: int, seed: int) -> list[Drawn]:
    """`count` different mutants of a target, or all that there are, in an order that the seed decides."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    places = []
    for path in sorted({path for pattern in TARGETS[target].modules.split() for path in (ROOT / "src" / "lmworks").glob(pattern)}):
        pieces = _pieces(path.read_text(encoding="utf-8"))
        nodes = [(number, node) for number, (_, piece, _) in enumerate(pieces) for node in ast_nodes(get_ast(piece))]
        for name in sorted(operator_names()):
            if get_operator(name).arguments():
                continue  # which variable to replace would have to be named
            operator = get_operator(name)()
            positions = [(number, begin) for number, node in nodes for begin, _ in operator.mutation_positions(node)]
            firsts: dict[int, int] = {}
            for number, (piece, begin) in enumerate(positions):
                places.append((path, name, number, pieces[piece], number - firsts.setdefault(piece, number), begin))
    random.Random(seed).shuffle(places)
    found: list[Drawn] = []
    for path, name, number, (above, piece, below), number_inside, (line, column) in places:
        if len(found) == count:
            break
        mutated = mutate_code(piece, get_operator(name)(), number_inside)
        if mutated is not None and (changed := _evaluated(mutated)) is not None and changed != _evaluated(piece):
            place = f"{path.relative_to(ROOT / 'src' / 'lmworks')}:{above.count(chr(10)) + line}:{column}"
            found.append(Drawn(f"{place} {name.rpartition('/')[2]} {number}", str(path.relative_to(ROOT)), above + piece + below,
                               above + mutated + below))  # fmt: skip
    return found


def _pieces(source: str) -> list[tuple[str, str, str]]:
    """The statements of a module, each with what is above and below: one is parsed for each mutant, which takes long for a module."""
    lines = source.splitlines(keepends=True)
    ends = [node.end_lineno or 0 for node in ast.parse(source).body]
    begins = [0, *ends[:-1]]
    return [("".join(lines[:begin]), "".join(lines[begin:end]), "".join(lines[end:])) for begin, end in zip(begins, ends, strict=True)]


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


@functools.lru_cache(maxsize=500)
def _evaluated(source: str) -> str | None:
    """What of a module is evaluated, or None if it is no module."""
    try:
        return ast.dump(_Unannotated().visit(ast.parse(source)))
    except SyntaxError:
        return None
