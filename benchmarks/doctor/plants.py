"""What `make doctor` plants: faults whose cause is known, each in three doses, and healthy runs that look odd.

A plant has the code of the cause that a doctor should name (docs/doctor.md), and for each dose what it changes: keys of the recipe, the
data (`recipe.DATA`), or a fault in the process (`hooks`). `scenario` says how a run is carried out (`scenarios`). Runs without a code must
stay silent.
"""

# mypy: disable-error-code="misc"
# (lambdas with defaults)
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recipe import MOE, SOURCES, Size

Sets = Callable[[Size], list[str]]
PHASE = "train.phases.0"
DOSES = ("weak", "clear", "strong")


@dataclass(frozen=True)
class Dose:
    """What one dose changes: overrides for a size, the data, faults as (function of `hooks`, its arguments), options of the scenario."""

    sets: Sets = lambda size: []
    data: str = "base"
    hooks: tuple[tuple[str, dict[str, Any]], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


FIRST_SEED = 22  # even. Seeds below it have been published, and rules were changed after they had been looked at


@dataclass(frozen=True)
class Plant:
    """`code`: the cause; empty for a run that must stay silent. `starred`: users meet it most. `accepted`: other causes that are right.
    `first_seed`, even: its rule was changed after runs with lower seeds had been looked at."""

    name: str
    code: str
    about: str
    doses: dict[str, Dose]
    starred: bool = False
    scenario: str = "pretrain"
    sizes: tuple[str, ...] = ("small", "medium")
    accepted: tuple[str, ...] = ()
    first_seed: int = FIRST_SEED

    @property
    def silent(self) -> bool:
        return not self.code


PLANTS: dict[str, Plant] = {}

CODES: dict[str, tuple[str, ...]] = {
    "A1": ("learning-rate-too-high",), "A2": ("learning-rate-too-low",), "A4": ("schedule-ends-early",), "A5": ("no-clipping",),
    "A6": ("eps-too-large",), "A7": ("weight-decay-too-strong",), "A8": ("init-too-wide",), "A9": ("batch-too-small",),
    "B1": ("fp16-overflow",), "B2": ("bad-batch",), "B3": ("operator-overflow",), "B4": ("silent-corruption",),
    "C1": ("unshuffled-data", "order-changed"), "C2": ("noisy-source",), "C3": ("duplicated-data",), "C4": ("validation-leak",),
    "C5": ("missing-domain",), "C6": ("wrong-tokenizer",), "C7": ("wasted-tokens",), "D1": ("overfitting",), "D2": ("forgetting",),
    "D3": ("too-few-tokens",), "E1": ("damaged-checkpoint",), "E2": ("optimizer-state-lost",), "E3": ("data-position-lost",),
    "E4": ("schedule-changed",), "E5-full": ("disk-full",), "E5-slow": ("slow-saves",), "M1": ("experts-collapsed",),
    "M2": ("bias-rate-too-high",), "T1": ("end-token-not-trained", "prompt-not-masked", "labels-all-masked"),
    "G1-hard": ("rewards-all-wrong",), "G1-trivial": ("rewards-all-right",), "G1-cut": ("answers-cut",), "G1-raising": ("reward-failing",),
    "G2": ("dpo-over-optimized",), "S1": ("slow-loader",), "S2": ("machine-oversubscribed",), "S3-slow": ("slow-rank",),
    "S3-start": ("slow-rank",),
    "S3-hung": ("hung-rank", "hung-collective"), "S3-dead": ("dead-rank",), "S3-oom": ("out-of-memory-killed",),
}  # fmt: skip
"""The codes of lmworks doctor that name a planted cause."""


def plant(name: str, code: str, about: str, weak: Dose, clear: Dose, strong: Dose | None, **more: Any) -> None:
    doses = {name: dose for name, dose in zip(DOSES, (weak, clear, strong), strict=True) if dose is not None}
    PLANTS[name] = Plant(name, code, about, doses, **more)


def healthy(name: str, about: str, dose: Dose, **more: Any) -> None:
    PLANTS[name] = Plant(name, "", about, {"clear": dose}, **more)


def _rate(factor: float, *more: str, **given: Any) -> Dose:
    return Dose(lambda size: [*size.rates(factor), *more], **given)


def _set(*sets: str, **given: Any) -> Dose:
    return Dose(lambda size: list(sets), **given)


def _hook(name: str, *sets: str, data: str = "base", **arguments: Any) -> Dose:
    return Dose(lambda size: list(sets), data=data, hooks=((name, arguments),))


def _schedule(**keys: Any) -> str:
    return f"{PHASE}.lr_schedule={json.dumps(keys)}"


def _mixture(**weights: float) -> str:
    total = sum(weights.values())
    return f"{PHASE}.mixture={json.dumps({name: weight / total for name, weight in weights.items()})}"


def _moe(**balance: Any) -> str:
    return f"model.moe={json.dumps(MOE | {'balance': MOE['balance'] | balance})}"


# Learning rate and optimizer.

plant("A1", "A1", "learning rate too high", _rate(10), _rate(30), _rate(100), starred=True)
plant("A2", "A2", "learning rate too low", _rate(0.03), _rate(0.01), _rate(0.003), starred=True)


def _early(end: float) -> Dose:
    return _set(_schedule(kind="multistep", warmup="5%", milestone_fractions=[end, end + 0.02], gamma=0.04))


plant("A4", "A4", "the schedule ends early", _early(0.7), _early(0.4), _early(0.2))
_no_clip = "optimizer.max_grad_norm=0"
plant(
    "A5", "A5", "no clipping, and rows that need it",
    *(Dose(lambda size, factor=factor: [*size.rates(factor), _no_clip], hooks=(("scaled_loss", {"every": 23, "factor": scale}),))
      for factor, scale in ((1, 30.0), (3, 100.0), (5, 1000.0))),
)  # fmt: skip
_adamw = "optimizer.kind=adamw"
plant("A6", "A6", "eps too large", *(_rate(0.3, _adamw, f"optimizer.eps={eps}") for eps in (1e-3, 1e-2, 1e-1)))
plant(
    "A7",
    "A7",
    "weight decay too strong",
    _set("optimizer.weight_decay=2"),
    _set("optimizer.weight_decay=10"),
    _rate(2, "optimizer.weight_decay=10"),
)
plant("A8", "A8", "initial weights too large", *(_set(f"model.initializer_range={value}") for value in (0.2, 0.5, 1.0)))


def _small_batch(rows: int, divide: int) -> Dose:
    def sets(size: Size) -> list[str]:
        length = size.length // divide
        return [
            f"{PHASE}.global_batch_tokens={rows * length} tokens", f"{PHASE}.sequence_length={length} tokens",
            size.budget(300, rows * length),
        ]  # fmt: skip

    return Dose(sets)


plant("A9", "A9", "batch too small", _small_batch(1, 1), _small_batch(1, 4), _small_batch(1, 8))

# Numbers that are not finite, and hardware.

_fp16 = "train.precision=fp16"
plant(
    "B1", "B1", "fp16 overflows",
    *(_hook("exploding", _fp16, factor=factor, first=first) for factor, first in ((3e5, 60), (1e7, 40), (1e9, 0))), starred=True,
)  # fmt: skip
plant(
    "B2",
    "B2",
    "bad rows in the data",
    _hook("bad_rows", "stability.spike.action=rollback", "stability.skip_steps=1", first=110, steps=1, share=0.5),
    _hook("bad_rows", "stability.spike.action=rollback", "stability.skip_steps=1", first=110, steps=3, share=1.0),
    _hook("bad_rows", "stability.spike.action=rollback", "stability.skip_steps=1", first=110, steps=8, share=1.0),
    starred=True,
)
plant(
    "B3",
    "B3",
    "one operator explodes",
    _hook("exploding", factor=1e39, first=60, every=7),
    _hook("exploding", factor=1e39, first=60),
    _hook("exploding", factor=1e39, first=0),
)
plant(
    "B4",
    "B4",
    "silent corruption",
    _hook("flipped_bit", "stability.recheck_every=10 steps", first=60, bit=12, every=7),
    _hook("flipped_bit", "stability.recheck_every=10 steps", first=60, bit=20, every=7),
    _hook("flipped_bit", "stability.recheck_every=10 steps", first=60, bit=27, every=7),
)

# Data.

plant("C1", "C1", "data in order", *(_hook("sorted_order", block=block) for block in (0.1, 0.25, 1.0)))


def _noise(share: float) -> Dose:
    rest = (1 - share) / len(SOURCES)
    return _set(_mixture(**dict.fromkeys(SOURCES, rest), scans=share), data="noise")


plant("C2", "C2", "a source of random text", _noise(0.05), _noise(0.2), _noise(0.5))


def _only(source: str, rest: float) -> str:
    others = [name for name in SOURCES if name != source]
    return _mixture(**{source: 1 - rest}, **{name: rest / len(others) for name in others if rest})


plant(
    "C3", "C3", "duplicated data",
    *(_set("shards.packing=best_fit", _mixture(speeches=0.2, chats=0.2, stories=0.4, docs=0.2), data=f"copies-{times}")
      for times in (4, 16, 60)),
)  # fmt: skip


def _leaked(share: float) -> Dose:
    rest = (1 - share) / len(SOURCES)
    return _set(_mixture(**dict.fromkeys(SOURCES, rest), mirror=share), "shards.max_epochs=1000", data="leak")


plant("C4", "C4", "validation text among the training text", _leaked(0.1), _leaked(0.4), _leaked(0.8))
plant(
    "C5",
    "C5",
    "a domain is missing",
    _set(_mixture(speeches=1, chats=1, docs=1, stories=0.05)),
    _set(_mixture(speeches=1, chats=1, stories=1)),
    _set(_mixture(speeches=1)),
)
plant("C6", "C6", "tokens of another tokenizer", *(_hook("mixed_tokens", share=share) for share in (0.4, 1.0, 1.0)))


def _wasted(length: float) -> Dose:
    def sets(size: Size) -> list[str]:
        tokens = int(size.length * length)
        return [
            f"{PHASE}.sequence_length={tokens} tokens", f"{PHASE}.global_batch_tokens={8 * tokens} tokens", size.budget(160, 8 * tokens),
            "shards.packing=best_fit",
        ]  # fmt: skip

    return Dose(sets, data="halves")


plant("C7", "C7", "most of each row is padding", _wasted(0.8), _wasted(1.0), None)  # in longer rows two of its documents fit


def _overfit(data: str, width: int, steps: int) -> Dose:
    def sets(size: Size) -> list[str]:
        return [
            size.budget(steps), _mixture(stories=1.0), "shards.max_epochs=1000", f"model.hidden_size={width}",
            f"model.intermediate_size={3 * width}",
        ]  # fmt: skip

    return Dose(sets, data=data)


plant(
    "D1",
    "D1",
    "overfitting",
    _overfit("tiny-40k", 64, 160),
    _overfit("tiny-20k", 96, 160),
    _overfit("tiny-10k", 128, 160),
    starred=True,
)
plant("D3", "D3", "too few tokens", *(Dose(lambda size, steps=steps: [size.budget(steps)]) for steps in (50, 25, 10)))

# Checkpoints and resumption: stopped at a step, changed, and run again.

_stop = {"stop": 100}
plant(
    "E1", "E1", "a damaged checkpoint",
    *(Dose(lambda size: ["checkpoints.keep_last=2"], options=_stop | {"between": how})
      for how in ("truncate_newest", "flip_newest", "flip_all")),
    starred=True, scenario="resumed",
)  # fmt: skip
plant(
    "E2", "E2", "optimizer state lost",
    *(Dose(lambda size, factor=factor: size.rates(factor), options=_stop | {"between": "reset_optimizer"}) for factor in (1, 2, 4)),
    scenario="resumed",
)  # fmt: skip
plant(
    "E3", "E3", "data position lost at a resume",
    *(Dose(lambda size: ["shards.max_epochs=1000"], data=data, options={"stop": stop, "hooks": [("rows_again", {"offset": stop})]})
      for data, stop in (("base", 50), ("base", 90), ("base", 120))),
    scenario="resumed",
)  # fmt: skip
plant(
    "E4", "E4", "schedule changed at a resume",
    *(Dose(options=_stop | {"factor": factor}) for factor in (2, 5, 20)), scenario="resumed",
)  # fmt: skip
_sync = "checkpoints.asynchronous=false"
plant(
    "E5-full", "E5-full", "the disk is full",
    *(_hook("full_disk", "train.save_every=10 steps", "stability.max_failed_saves=3", after=after) for after in (6, 3, 0)), starred=True,
)  # fmt: skip
plant(
    "E5-slow", "E5-slow", "saves are slow", *(_hook("slow_saves", "train.save_every=10 steps", _sync, seconds=s) for s in (0.1, 0.4, 1.0)),
    starred=True,
)  # fmt: skip

# Experts.

plant(
    "M1",
    "M1",
    "experts collapse",
    Dose(lambda size: [*size.rates(3), _moe(method="none")]),
    Dose(lambda size: [_moe(bias_update_rate=0.02)], hooks=(("rich_experts", {}),)),
    Dose(lambda size: [_moe(bias_update_rate=0.05)], hooks=(("rich_experts", {}),)),
    starred=True,
)
plant(
    "M2",
    "M2",
    "the balancing rate of the experts is too high",
    *(_set(_moe(bias_update_rate=rate)) for rate in (0.1, 0.3, 1.0)),
)

# The machine.


plant("S1", "S1", "slow storage", *(_hook("slow_data", factor=factor) for factor in (1.5, 2.5, 5.0)), starred=True)
plant("S2", "S2", "the machine is oversubscribed", *(_hook("quota", share=share) for share in (0.5, 0.25, 0.12)), starred=True,
      first_seed=32)  # fmt: skip

# Later stages, from the base model of the same seed.

plant(
    "D2",
    "D2",
    "forgetting",
    starred=True,
    scenario="later",
    sizes=("small", "medium"),
    weak=Dose(options={"stage": "tune", "rate": 3}),
    clear=Dose(options={"stage": "tune", "rate": 10}),
    strong=Dose(options={"stage": "tune", "rate": 30}),
)
plant(
    "T1",
    "T1",
    "mask or end token wrong",
    starred=True,
    scenario="later",
    weak=Dose(options={"stage": "tune", "wrong": "end_masked"}),
    clear=Dose(options={"stage": "tune", "wrong": "all_trained"}),
    strong=Dose(options={"stage": "tune", "wrong": "inverted"}),
)
for _kind, _about in (
    ("hard", "no answer is right"),
    ("trivial", "every answer is right"),
    ("cut", "answers are cut"),
    ("raising", "the reward fails"),
):
    plant(
        f"G1-{_kind}",
        f"G1-{_kind}",
        f"reinforcement learning without signal: {_about}",
        starred=True,
        scenario="later",
        weak=Dose(options={"stage": "grpo", "reward": _kind, "share": 0.8}),
        clear=Dose(options={"stage": "grpo", "reward": _kind, "share": 0.98}),
        strong=Dose(options={"stage": "grpo", "reward": _kind, "share": 1.0}),
    )
plant(
    "G2",
    "G2",
    "preferences over-optimized",
    scenario="later",
    weak=Dose(options={"stage": "dpo", "rate": 10, "beta": 0.05}),
    clear=Dose(options={"stage": "dpo", "rate": 100, "beta": 0.01}),
    strong=Dose(options={"stage": "dpo", "rate": 300, "beta": 0.01}),
)
for _kind, _name in {"slow": "slow", "slow from the start": "start", "hung": "hung", "dead": "dead", "oom": "oom"}.items():
    plant(
        f"S3-{_name}",
        f"S3-{_name}",
        f"a rank is {_kind}",
        starred=_name != "start",
        scenario="ranks",
        sizes=("small",),
        weak=Dose(options={"fault": _kind, "dose": 0}),
        clear=Dose(options={"fault": _kind, "dose": 1}),
        strong=Dose(options={"fault": _kind, "dose": 2}),
    )

# Runs that must stay silent: healthy, some of them odd.

healthy("H-base", "the recipe as it is", Dose())
healthy("H-adamw", "AdamW for all weights", _rate(0.3, _adamw))
healthy("H-cosine", "a cosine schedule", _set(_schedule(kind="cosine", warmup="10%", min_lr_ratio=0.0)))
healthy("H-linear", "a linear schedule", _set(_schedule(kind="linear", warmup="2%", min_lr_ratio=0.0)))
healthy("H-norms", "norms of queries and keys", _set("model.use_qk_norm=true"))
healthy("H-tied", "another width and more weight decay", _set("optimizer.weight_decay=0.3", "model.tie_word_embeddings=true"))
healthy("H-moe", "a balanced mixture of experts", _set(_moe()))
healthy("H-low", "a rate three times lower", _rate(0.3))
healthy("N1", "a high but stable rate", _rate(3))


def _two_phases(second: dict[str, Any]) -> Sets:
    def sets(size: Size) -> list[str]:
        first = {
            "name": "general", "tokens": f"{110 * size.batch} tokens", "mixture": dict.fromkeys(SOURCES, 0.25),
            "sequence_length": f"{size.length} tokens", "global_batch_tokens": f"{size.batch} tokens",
            "lr_schedule": {"kind": "wsd", "warmup": "5%", "decay": "0%"},
        }  # fmt: skip
        changed = {key: value(size) if callable(value) else value for key, value in second.items()}
        late = {"warmup": "0%", "kind": "linear", "min_lr_ratio": 0.1}
        after = first | {"name": "late", "tokens": f"{50 * size.batch} tokens", "lr_schedule": late} | changed
        return [f"train.phases={json.dumps([first, after])}"]

    return sets


healthy("N2", "a jump where the mixture changes", Dose(_two_phases({"mixture": {"docs": 0.8, "speeches": 0.2}})))
healthy(
    "N3",
    "longer sequences and another RoPE",
    Dose(_two_phases({"sequence_length": lambda size: f"{4 * size.length} tokens", "rope": {"theta": 50000.0}})),
)
healthy("N4", "a drop in the decay of WSD", _set(_schedule(kind="wsd", warmup="5%", decay="10%", min_lr_ratio=0.0)))
healthy(
    "N5",
    "a batch ramp",
    Dose(lambda size: [f"{PHASE}.batch_ramp=" + json.dumps({"start_tokens": f"{size.batch // 4} tokens", "over": "40 steps"})]),
)
healthy("N6", "a slow machine that is shared", _hook("quota", share=0.6))
healthy(
    "N7",
    "a noisy small batch",
    Dose(lambda size: [f"{PHASE}.global_batch_tokens={size.batch // 4} tokens", size.budget(160, size.batch // 4)]),
)
healthy(
    "N8", "three epochs, validation falls",
    Dose(lambda size: [_mixture(stories=1.0), f"{PHASE}.global_batch_tokens={size.batch // 2} tokens", size.budget(160, size.batch // 2)],
         data="tiny-80k"),
)  # fmt: skip
healthy("N9", "one spike that recovers", _hook("one_large_step", at=110, factor=30.0))
healthy("N10", "DPO: the chosen reward falls, accuracy rises", Dose(options={"stage": "dpo", "rate": 1, "beta": 0.1}), scenario="later")
healthy("N11", "GRPO: the loss is 0", Dose(options={"stage": "grpo", "reward": "own", "share": 0.0}), scenario="later")
healthy("N12", "fp16 halves its scale now and then", _set(_fp16))
healthy("N13", "every step is clipped", _set("optimizer.max_grad_norm=0.05"))
healthy(
    "N14", "killed and resumed", Dose(options={"stop": 100, "kill": True}), scenario="resumed"
)
healthy("N15", "experts out of balance in the first steps", _set(_moe(bias_update_rate=0.003)))
healthy("N16", "a slow first step", _hook("slow_start", seconds=1.5))
healthy("N17", "domains with unequal losses", _set(_mixture(speeches=0.55, chats=0.15, stories=0.15, docs=0.15)))
healthy("N18", "attention across documents", _set(f"{PHASE}.mask_documents=false"))
healthy(
    "N19",
    "early stopping",
    _set("train.early_stopping=" + json.dumps({"patience": 1, "min_delta": 0.08})),
)
healthy("N20", "stopped with Ctrl-C", Dose(options={"stop": 100, "leave": True}), scenario="resumed")
healthy("N21", "healthy tuning with replay", Dose(options={"stage": "tune", "rate": 3, "replay": True}), scenario="later")

PAIRS = (("A1", "S1"), ("C5", "S1"), ("A2", "E5-slow"), ("C2", "S1"), ("A8", "C5"), ("B2", "S1"))
"""Two faults at once: the first is the primary one."""


def combined(first: str, second: str) -> Plant:
    """A plant with the clear doses of two; its code is that of the first."""
    one, other = PLANTS[first].doses["clear"], PLANTS[second].doses["clear"]
    both = Dose(
        lambda size: [*other.sets(size), *one.sets(size)], one.data if one.data != "base" else other.data, (*one.hooks, *other.hooks)
    )
    return Plant(
        f"{first}+{second}", PLANTS[first].code, f"{PLANTS[first].about}; {PLANTS[second].about}", {"clear": both},
        accepted=(PLANTS[second].code,),
    )  # fmt: skip


PLANTS |= {made.name: made for made in (combined(*pair) for pair in PAIRS)}
