"""Decides whether an export is the trained model: `transformers` loads it, and both compute the same tokens.

**The rule.** Two right implementations of a model differ by rounding only, and rounding is what fp64 takes away. Both sides are therefore
computed in fp64 (`lmworks.export.float64`), on real text and on random tokens, and the logits may differ by

    bound = SLACK * 2^-29 * (r_ours + r_theirs)

of the largest logit. r is the distance of a side's fp32 logits from its own fp64 logits, also of the largest logit and at least 2^-24: the
growth of rounding errors through this model, measured. The same growth applies to the errors of fp64, which are 2^-29 of those of fp32.
So a deep or badly conditioned model gets a wider bound, and every bound is far below what any wrong number costs.

**What is checked besides.** Tables of RoPE are computed in fp32 by both sides, and may differ in the last bits: they must agree within
`_TABLE_ULPS` units in the last place, and then both sides use the same. Tensors of the files are read back and must be equal to the
model's, bit for bit, so that rows that no token reads are right too.

**What it cannot see.** Anything that no compared token reaches: windows and positions beyond the sequences (512 tokens at most), code of
`transformers` for options that the config does not set; in memory, not in the files, experts that no token selects (they are counted).
Where two experts are tied, both sides use the choice of `transformers`.

**Cost.** No more memory than to hold the model three times in fp32 (12 bytes for each parameter: 96 GB for 8B parameters, 4.3 TB for 355B,
refused before anything is written on a machine with less), and twelve bytes for each weight of the largest matrix. An fp64 pass takes about
three times as long as one in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lmworks.errors import UserError
from lmworks.export.float64 import in_float64
from lmworks.export.huggingface import quiet_transformers, unequal_tensors
from lmworks.io.files import final_name
from lmworks.model import Transformer
from lmworks.model.router import Router
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.manifest import Manifest
from lmworks.shards.validation import Validation
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.weights.names import rounded_in_class

_ROWS, _RANDOM_ROWS = 4, 2  # sequences of text, at least, since each domain gives one or more; and of random tokens
_LONGEST, _RANDOM_LONGEST = 512, 256  # tokens of each
_MOST = 2048  # tokens of text, which bounds the time for many domains
_FEWEST = 64  # of one domain

TEXT = """\
The ferry left at 7:45, twelve minutes late, and nobody on the upper deck seemed to mind. "It's always like this in October," said the \
woman beside me; she'd crossed 1,204 times, she told us, and she wasn't counting. We'll see the lighthouse soon, won't we?

Die Brücke über den Fluß wurde 1897 gebaut und kostete 3.500.000 Mark. Où est la clé de l'atelier ? ¿Cuánto cuesta el billete de ida?
Поезд отходит в 6:30 с третьего пути. 列車は午前九時に京都駅を出発します。 今天的天气很好，我们去公园散步吧。 서울의 겨울은 춥다.
القطار يصل في الساعة الثامنة. रेलगाड़ी सुबह आठ बजे आती है। รถไฟออกเวลาเก้าโมง 🚂🌊 e\u0301té

    def area(width: float, height: float = 2.0) -> float:
        # both in metres
        return round(width * height, 3) if width > 0 else 0.0

{"id": 4711, "tags": ["a", "b"], "ratio": 0.125, "ok": true}\tx^2 + y^2 = r^2  <b>bold</b>  https://example.org/?q=1&r=2
"""
"""For a run without a corpus: several scripts, digits, code, marks and white space."""


def compared_tokens(recipe: Recipe, shards_dir: Path, tokenizer: Tokenizer) -> dict[str, list[Tensor]]:
    """Sequences of token ids (T,): held-out text of the run, or `TEXT` plain and as a conversation if it has none; and random ids."""
    text = list(held_out_tokens(recipe, shards_dir)) if recipe.has_text else bundled_tokens(recipe, tokenizer)
    return {"text": text, "random": list(drawn_tokens(recipe, tokenizer))}


def held_out_tokens(recipe: Recipe, shards_dir: Path) -> Tensor:
    """(B, T) token ids of held-out documents, the same number of sequences from every domain."""
    manifest = Manifest.load(shards_dir)
    rows = -(-_ROWS // len(manifest.domains()))
    longest = min(_LONGEST, max(_FEWEST, _MOST // (rows * len(manifest.domains()))))
    length = min([longest, *(int(phase.sequence_length) for phase in recipe.train.phases[-1:])])
    found = [Validation(shards_dir, manifest, domain, length, rows).batch(0) for domain in manifest.domains()]
    return torch.from_numpy(np.concatenate([batch.tokens for batch in found])).long()


def bundled_tokens(recipe: Recipe, tokenizer: Tokenizer) -> list[Tensor]:
    """`TEXT`, and a conversation about it if there is a chat template."""
    found = [tokenizer.encode(TEXT)]
    if tokenizer.has_chat_template:
        try:
            chat = [{"role": "user", "content": TEXT[:200]}, {"role": "assistant", "content": "A crossing by ferry."}]
            found.append(tokenizer.encode_chat([*chat, {"role": "user", "content": "What did it cost?"}], add_generation_prompt=True)[0])
        except UserError:  # a template that wants more than messages
            pass
    longest = min(_LONGEST, int(recipe.model.max_position_embeddings or _LONGEST))
    return [torch.tensor(ids[:longest]) for ids in found]


def drawn_tokens(recipe: Recipe, tokenizer: Tokenizer) -> Tensor:
    """(B, T) ids of random words, which reach rows and experts that text does not."""
    generator = torch.Generator().manual_seed(recipe.seed)
    length = min(_RANDOM_LONGEST, int(recipe.model.max_position_embeddings or _RANDOM_LONGEST))
    return torch.randint(tokenizer.vocab_size, (_RANDOM_ROWS, length), generator=generator)


SLACK = 32.0
"""Times the expected rounding in fp64. Measured: at most 0.85 times, over all classes of models with 4, 30 and 64 layers."""
_FP32, _FP64 = 2.0**-24, 2.0**-53
_TABLE_ULPS = 8


class NotLoaded(UserError):
    """transformers cannot load an export."""


@dataclass(frozen=True)
class Measured:
    """Differences of logits, as parts of the largest logit.

    relative: between the two sides in fp64; fp32: between the two sides in fp32; our_rounding, their_rounding: of each side in fp32 from
    itself in fp64. same_choice: the share of positions with the same likeliest token in fp32.
    """

    tokens: int
    relative: float
    fp32: float
    our_rounding: float
    their_rounding: float
    same_choice: float


@dataclass(frozen=True)
class Parity:
    """The comparison of an export with the trained model.

    relative: the largest difference of a logit in fp64, as part of the largest logit, and `bound` the most that counts as equal. kinds: the
    same for each kind of tokens. narrow: operations of transformers that could not be computed in fp64, for which the bound is that of
    fp32. unreached_experts: how many no token selected. problems: what differs beside the logits, in words. where: the sequence and the
    position of the largest difference, and first_difference the first layer whose output differs, if the export is refused.
    """

    tokens: int
    relative: float
    bound: float
    fp32: float
    same_choice: float
    kinds: dict[str, Measured] = field(default_factory=dict)
    narrow: tuple[str, ...] = ()
    unreached_experts: int = 0
    problems: tuple[str, ...] = ()
    where: str = ""
    first_difference: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the export is not the model, in one line; None if it is."""
        if self.problems:
            return self.problems[0]
        if self.relative <= self.bound:
            return None
        first = f", first in {self.first_difference}" if self.first_difference else ""
        return f"logits by {self.relative:.1e} of the largest, more than the {self.bound:.1e} of rounding, at {self.where}{first}"


@torch.no_grad()
def compare(model: Transformer, directory: Path, tokens: Tensor | Mapping[str, Sequence[Tensor]], dtype: torch.dtype) -> Parity:
    """Load the export in `transformers` and compare it with `model`, whose weights are rounded to the export's dtype for that.

    `tokens`: sequences of token ids (T,) for each kind of tokens; or (B, T). Raises `UserError` if transformers cannot load the export.
    """
    theirs = _load_in_transformers(directory)
    ours = deepcopy(model).to("cpu").eval()
    for name, tensor in ours.state_dict().items():
        if not name.endswith("router.bias"):  # exported in fp32
            tensor.copy_(rounded_in_class(name, tensor, ours.config, dtype))
    problems = list(_use_one_table(ours, theirs))
    problems += [f"tensor {name} of the files is not the model's" for name in unequal_tensors(ours, directory, dtype)]
    kinds = {"tokens": list(tokens)} if isinstance(tokens, Tensor) else tokens
    narrow: set[str] = set()
    reached: set[tuple[int, int]] = set()  # layers and experts
    found: dict[str, Measured] = {}
    worst, where, worst_ids = -1.0, "", torch.empty(0)
    for kind, rows in kinds.items():
        parts = []
        for number, ids_T in enumerate(rows, 1):
            measured, position = _measure(ours, theirs, ids_T.cpu()[None], narrow, reached)
            parts.append(measured)
            if not measured.relative <= worst:
                worst, worst_ids = measured.relative, ids_T
                where = f"position {position} (token {int(ids_T[position])}) of sequence {number} of {kind}"
        found[kind] = _joined(parts)
    whole = _joined(list(found.values()))
    rounding = sum(min(max(side, _FP32), 1.0) for side in (whole.our_rounding, whole.their_rounding))
    bound = SLACK * rounding * (_FP64 / _FP32) if not narrow else 2 * rounding
    unreached = sum(router.moe.n_routed_experts for router in _routers(ours)) - len(reached)
    first = None
    if not whole.relative <= bound:
        first = _first_difference(ours, theirs, worst_ids[None], bound)
    return Parity(
        whole.tokens, whole.relative, bound, whole.fp32, whole.same_choice, found, tuple(sorted(narrow)), unreached, tuple(problems), where,
        first,
    )  # fmt: skip


def require_parity(parity: Parity, directory: Path) -> None:
    """Raise `UserError` if the export is not equal to the trained model (promise 8)."""
    if parity.reason is not None:
        raise UserError(f"the export in {final_name(directory)} differs from the trained model: {parity.reason}")


def _measure(ours: Transformer, theirs: Any, ids_BT: Tensor, narrow: set[str], reached: set[tuple[int, int]]) -> tuple[Measured, int]:
    """The differences for one sequence, and the position of the largest one."""
    found, expected = _logits(ours, theirs, ids_BT)
    with in_float64() as left, _exact_decays(theirs):
        found64, expected64 = _logits(ours, theirs, ids_BT, reached)
    narrow |= left
    largest = float(expected64.abs().max()) or 1.0

    def distance(one: Tensor, other: Tensor) -> float:
        value = float((one.double() - other.double()).abs().max()) / largest
        return value if value == value else float("inf")  # NaN

    differences_T = (found64 - expected64).abs().amax(-1)[0].nan_to_num(float("inf"))
    same = float((found.argmax(-1) == expected.argmax(-1)).float().mean())
    exact, rounded = distance(found64, expected64), distance(found, expected)
    measured = Measured(ids_BT.numel(), exact, rounded, distance(expected, expected64), distance(found, found64), same)
    return measured, int(differences_T.argmax())


def _logits(ours: Transformer, theirs: Any, ids_BT: Tensor, reached: set[tuple[int, int]] | None = None) -> tuple[Tensor, Tensor]:
    """Their logits (B, T, V) and ours, with experts chosen by their router logits.

    Sums in another order occasionally decide a near-tie between two experts differently, which changes the logits but is not an error.
    """
    output = theirs(ids_BT, output_router_logits=True, use_cache=False) if ours.config.moe else theirs(ids_BT, use_cache=False)
    with _experts_of(ours, output, set() if reached is None else reached):
        return output.logits, ours(ids_BT)


@contextmanager
def _experts_of(ours: Transformer, output: Any, reached: set[tuple[int, int]]) -> Iterator[None]:
    routers = _routers(ours)
    for number, (router, logits_NE) in enumerate(zip(routers, output.router_logits if routers else (), strict=True)):
        router._select = partial(_select_by, router, router._select, logits_NE, number, reached)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for router in routers:
            del router._select


def _routers(model: Transformer) -> list[Router]:
    return [module for module in model.layers.modules() if isinstance(module, Router)]


def _select_by(
    router: Router, select: Callable[[Tensor, Tensor], Tensor], logits_NE: Tensor, number: int, reached: set[tuple[int, int]],
    gates_NE: Tensor, _: Tensor,
) -> Tensor:  # fmt: skip
    logits_NE = logits_NE.to(gates_NE.dtype).view_as(gates_NE)
    experts_NK = select(router.gates(logits_NE), logits_NE)
    reached.update((number, expert) for expert in experts_NK.unique().tolist())
    return experts_NK


def _joined(parts: Sequence[Measured]) -> Measured:
    tokens = sum(part.tokens for part in parts)
    same = sum(part.same_choice * part.tokens for part in parts) / max(tokens, 1)

    def worst(name: str) -> float:
        return max((float(getattr(part, name)) for part in parts), default=0.0)

    return Measured(tokens, worst("relative"), worst("fp32"), worst("our_rounding"), worst("their_rounding"), same)


def _use_one_table(ours: Transformer, theirs: nn.Module) -> Iterator[str]:
    """Take over their inverse frequencies where they are ours but for the last bits; yields what differs otherwise."""
    for name, table in theirs.named_buffers():
        kind = name.rpartition(".")[2]
        mine = ours.sliding_inverse_frequencies if kind == "sliding_attention_inv_freq" else ours.inverse_frequencies
        if kind not in ("inv_freq", "full_attention_inv_freq", "sliding_attention_inv_freq") or mine is None:
            continue
        if table.shape != mine.shape:
            yield f"{name} has {table.numel()} rotated pairs, and the model {mine.numel()}"
        elif not bool(((table.float() - mine).abs() <= _TABLE_ULPS * _FP32 * mine.abs()).all()):
            at = int(((table.float() - mine).abs() / mine.abs().clamp(min=1e-30)).argmax())
            yield f"its inverse frequency {at} is {float(table[at]):.8g} and the model's {float(mine[at]):.8g} (theta or scaling of RoPE)"
        else:
            mine.copy_(table)


@contextmanager
def _exact_decays(theirs: Any) -> Iterator[None]:
    """The constant decays of lightning attention in fp64: transformers keeps tables of them, each rounded to fp32."""
    kept: list[tuple[Any, str, Tensor]] = []
    narrow = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for module in (one for one in theirs.modules() if hasattr(one, "decay_factors")):
            slopes = module.get_slope_rate()
            tables = (slopes, *module.decay_factors(slopes))
            for name, table in zip(("slope_rate", "query_decay", "key_decay", "diagonal_decay"), tables, strict=True):
                kept.append((module, name, getattr(module, name)))
                setattr(module, name, table)
        torch.set_default_dtype(narrow)
        yield
    finally:
        torch.set_default_dtype(narrow)
        for module, name, table in kept:
            setattr(module, name, table)


def _first_difference(ours: Transformer, theirs: Any, ids_BT: Tensor, bound: float) -> str | None:
    """The first layer whose output differs by more than `bound` of its largest value."""
    outputs: tuple[list[Tensor], list[Tensor]] = ([], [])
    hooks = []
    for found, layers in zip(outputs, (ours.layers, theirs.model.layers), strict=True):
        for layer in layers:
            hooks.append(layer.register_forward_hook(lambda _, __, out, kept=found: kept.append(out[0] if isinstance(out, tuple) else out)))
    try:
        with in_float64(), _exact_decays(theirs):
            _logits(ours, theirs, ids_BT.cpu())
    finally:
        for hook in hooks:
            hook.remove()
    if not torch.equal(theirs.get_input_embeddings().weight.float(), ours.embedding.weight):
        return "the embedding"
    for number, (mine, other) in enumerate(zip(*outputs, strict=True)):
        if not float((mine - other).abs().max()) <= bound * float(mine.abs().max()):
            return f"layer {number} of {len(outputs[0])}"
    return "the last norm or the head, behind all layers"


def _load_in_transformers(directory: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("checking an export needs transformers: pip install 'lmworks[export]'") from None
    with quiet_transformers():
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        except Exception as error:  # any failure means that the export is unusable
            reason = final_name(" ".join(f"{type(error).__name__}: {error}".split()))
            raise NotLoaded(f"transformers cannot load the export in {final_name(directory)} ({reason}): export again") from error
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the fused ones have no fp64
    return model
