"""What happens in a run of the campaign: a function of its seed alone."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

STEPS = 16  # ten in a first phase, whose batch grows over six, and six of longer sequences
RAMP, FIRST = 6, 10  # steps of the ramp, and of the first phase
BORDERS = (1, RAMP, FIRST, STEPS)  # steps that are done where something changes: the run, the batch, the phase, the end
LONG_STEPS = 28  # of runs whose world changes, which take time to find together

# Of each kind, so many in sixty-four runs.
DECK = {
    "kill a rank": 7, "kill all": 6, "SIGTERM": 5, "kill inside a save": 6, "damaged checkpoint": 7, "full disk": 4, "poisoned batch": 3,
    "NaN gradient": 3, "slow rank": 2, "hang": 3, "shrink": 2, "grow": 2,
    "skip window": 5, "kill between": 6, "kill in a roll back": 3,
}  # fmt: skip
LAYOUTS: dict[int, tuple[dict[str, Any], ...]] = {
    1: ({},),
    2: (
        {"dp_shard": 2, "zero": 0}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 2}, {"dp_shard": 2, "zero": 3}, {"dp_replicate": 2},
        {"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp_shard": 2, "ep": 2},
    ),
    3: ({"dp_shard": 3, "zero": 1}, {"dp_shard": 3, "zero": 3}, {"dp_replicate": 3}),
    4: (
        {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "pp": 2}, {"dp_replicate": 2, "dp_shard": 2, "zero": 3}, {"dp_shard": 4, "ep": 2},
        {"dp_shard": 2, "cp": 2},
    ),
}  # fmt: skip
RESIZED = ("shrink", "grow")
PLANTED = {"poisoned batch": "poison", "NaN gradient": "nan", "kill in a roll back": "poison"}
# Between which two acts of the first rank it is killed: before or after an event of the ledger, or what a save does besides.
POINTS = ("checkpoint", "phase", "finish", "flush", "publish", "prune", "remove")
IN_A_ROLL_BACK = ("bad_step", "rollback", "flush", "checkpoint", "phase")  # the last three: those that follow the rollback
_NEEDS_OTHERS = ("NaN gradient", "slow rank", "hang")


@dataclass(frozen=True)
class Plan:
    """One run.

    `moment`: the steps that are done when the fault strikes, and `delay` seconds later; 0 is before the first step, `delay` seconds after
    the start. For what is planted, the step itself, counted from 0. `rank`: whom it hits. `how`: the variant.
    `supervised`: through `lmworks launch local`; else one rank, `lmworks pretrain`, started again by the campaign.
    `point`: before or after what the first rank kills itself, and the how manieth time of its life. `window`: steps that a user leaves out.
    """

    seed: int
    kind: str
    ranks: int
    layout: dict[str, Any]
    supervised: bool
    moment: int
    delay: float
    rank: int
    how: str
    save_every: int
    asynchronous: bool
    point: tuple[str, int] | None = None
    window: tuple[int, int] | None = None

    @property
    def resized(self) -> bool:
        return self.kind in RESIZED

    @property
    def steps(self) -> int:
        return LONG_STEPS if self.resized else STEPS

    @property
    def same_bits(self) -> bool:
        """Whether the run must end with the bits of the undisturbed one: same layout, and no step left out."""
        return not self.resized and self.kind not in PLANTED

    def shown(self) -> dict[str, Any]:
        return asdict(self)


def draw(seed: int, kinds: dict[str, int] | None = None) -> Plan:
    """The plan of a seed. `kinds`: how many of each in a deck; some machines cannot have all."""
    chance = random.Random(f"plan {seed}")
    deck = [kind for kind, cards in (kinds or DECK).items() for _ in range(cards)]
    block, place = divmod(seed, len(deck))
    random.Random(f"deck {block}").shuffle(deck)
    kind = deck[place]
    if kind in RESIZED:
        ranks = chance.choice((3, 3, 4))
        layout = chance.choice(({"dp_shard": ranks, "zero": 1}, {"dp_shard": ranks, "zero": 3}, {"dp_replicate": ranks}))
    else:
        sizes, weights = ((2, 3, 4), (6, 1, 1)) if kind in _NEEDS_OTHERS else ((1, 2, 3, 4), (55, 35, 5, 5))
        ranks = chance.choices(sizes, weights)[0]
        layout = chance.choice(LAYOUTS[ranks])
    save_every = chance.choice((3, 4))
    asynchronous = chance.random() < 0.7
    moment, how = _moment(kind, chance, save_every)
    delay = chance.uniform(0, 5) if moment == 0 else chance.uniform(0, 0.05)
    supervised = ranks > 1 or chance.random() < 0.25
    if how == "supervisor" and not supervised:
        how = "all"
    plan = Plan(seed, kind, ranks, layout, supervised, moment, delay, chance.randrange(ranks), how, save_every, asynchronous)
    match kind:
        case "skip window":
            return _with_window(replace(plan, save_every=chance.choice((1, 2))), chance)
        case "kill between" | "kill in a roll back":
            return replace(plan, point=_point(plan, chance))
        case _:
            return plan


def _point(plan: Plan, chance: random.Random) -> tuple[str, int]:
    """A point that each run comes to: it saves three times at least, and enters two phases."""
    when = chance.choice(("before", "after"))
    if plan.kind == "kill in a roll back":
        return f"{when} {chance.choice(IN_A_ROLL_BACK[:None if plan.moment < FIRST else -1])}", 1
    what = chance.choice(POINTS)
    return f"{when} {what}", {"finish": 1, "phase": chance.randint(1, 2), "remove": 1}.get(what, chance.randint(1, 3))


def _with_window(plan: Plan, chance: random.Random) -> Plan:
    """A window at a border, before it or behind it, of one step, up to a border, to the end or beyond; it begins where there may be a
    checkpoint."""
    border = chance.choice(BORDERS)
    start = min(max(plan.save_every, border + chance.choice((-2, -1, 0, 0, 1))), STEPS - 1)
    stops = {start + 1, *(border + more for more in (0, 1, 2)), RAMP, FIRST, STEPS, STEPS + 5}
    stop = chance.choice(sorted(stop for stop in stops if stop > start))
    return replace(plan, moment=chance.randint(start, STEPS - 1), window=(start, stop))


def _step(chance: random.Random, least: int, most: int) -> int:
    """A step: as often as not at a border."""
    borders = [step for border in BORDERS for step in (border - 1, border) if least <= step <= most]
    return chance.choice(borders) if borders and chance.random() < 0.5 else chance.randint(least, most)


def _moment(kind: str, chance: random.Random, save_every: int) -> tuple[int, str]:
    late = STEPS - 1
    match kind:
        case "kill a rank":
            return (0 if chance.random() < 0.15 else _step(chance, 1, late)), "rank"
        case "kill all":
            return (0 if chance.random() < 0.15 else _step(chance, 1, late)), chance.choice(("all", "all", "supervisor"))
        case "kill inside a save":
            return _step(chance, 1, STEPS - save_every), chance.choice(("rank", "all"))
        case "damaged checkpoint":
            how = chance.choice(("flip and kill all", "flip and kill one", "truncate and kill all", "truncate and kill one"))
            return _step(chance, 2 * save_every + 1, late), how
        case "full disk":
            return _step(chance, 1, late), chance.choice(("checkpoints", "run"))
        case "poisoned batch" | "NaN gradient":
            how = chance.choice(("skip", "skip and kill", "roll back"))
            return _step(chance, save_every if how == "roll back" else 0, STEPS - 3 if how == "skip and kill" else late), how
        case "kill in a roll back":
            return _step(chance, save_every, late), "roll back"
        case "skip window":
            return 0, chance.choice(("kill", "stop", "end"))
        case "kill between":
            return 0, "point"
        case "shrink" | "grow":
            return chance.randint(2, 6), ""
        case _:
            return _step(chance, 1, STEPS - 4), ""


def overrides(plan: Plan) -> list[str]:
    """The recipe's values of a run, but where it lies. A run that is compared with one on another layout draws nothing at random."""
    whole = 1216 + 256 * 4  # tokens of the ramp and of four steps behind it
    values = [
        "model.num_key_value_heads=2", "model.num_hidden_layers=2", "train.compile=false", "train.validate_every=100%",
            "train.validation_bytes_per_domain=600 bytes",
        "train.sample_every=100%",
        f"train.phases.general.tokens={whole + (256 * 12 if plan.resized else 0)} tokens", "train.phases.long.tokens=1536 tokens",
        f"model.residual_dropout={0.0 if plan.resized else 0.1}", "stability.spike=null",
    ]  # fmt: skip
    return values + [f"layout.{axis}={size}" for axis, size in plan.layout.items()]


def harmless(plan: Plan) -> list[str]:
    """What reaches no weight: when is saved, how long is waited."""
    return [
        f"train.save_every={plan.save_every} steps", f"checkpoints.asynchronous={str(plan.asynchronous).lower()}",
        f"stability.max_bad_steps={1 if plan.how == 'roll back' else 10}", f"stability.skip_steps={1 + plan.seed % 4}",
        f"checkpoints.keep_last={99 if plan.kind == 'skip window' else 2}", "launch.timeout=20 s", "launch.max_restarts=20",
        "launch.exclude_after_failures=100", "launch.grace_period=60 s",
    ]  # fmt: skip
