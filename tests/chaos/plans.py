"""What happens in a run of the campaign: a function of its seed alone."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

STEPS = 16  # ten in a first phase, whose batch grows over six, and six of longer sequences
LONG_STEPS = 28  # of runs whose world changes, which take time to find together

# Of each kind, so many in fifty runs.
DECK = {
    "kill a rank": 7, "kill all": 6, "SIGTERM": 5, "kill inside a save": 6, "damaged checkpoint": 7, "full disk": 4, "poisoned batch": 3,
    "NaN gradient": 3, "slow rank": 2, "hang": 3, "shrink": 2, "grow": 2,
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
PLANTED = {"poisoned batch": "poison", "NaN gradient": "nan"}
_NEEDS_OTHERS = ("NaN gradient", "slow rank", "hang")


@dataclass(frozen=True)
class Plan:
    """One run.

    `moment`: the steps that are done when the fault strikes, and `delay` seconds later; 0 is before the first step, `delay` seconds after
    the start. For what is planted, the step itself, counted from 0. `rank`: whom it hits. `how`: the variant.
    `supervised`: through `lmworks launch local`; else one rank, `lmworks pretrain`, started again by the campaign.
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
    return Plan(seed, kind, ranks, layout, supervised, moment, delay, chance.randrange(ranks), how, save_every, asynchronous)


def _moment(kind: str, chance: random.Random, save_every: int) -> tuple[int, str]:
    late = STEPS - 2
    match kind:
        case "kill a rank":
            return (0 if chance.random() < 0.15 else chance.randint(1, late)), "rank"
        case "kill all":
            return (0 if chance.random() < 0.15 else chance.randint(1, late)), chance.choice(("all", "all", "supervisor"))
        case "kill inside a save":
            return chance.randint(1, STEPS - save_every), chance.choice(("rank", "all"))
        case "damaged checkpoint":
            how = chance.choice(("flip and kill all", "flip and kill one", "truncate and kill all", "truncate and kill one"))
            return chance.randint(2 * save_every + 1, late), how
        case "full disk":
            return chance.randint(1, STEPS - 2 * save_every), chance.choice(("checkpoints", "run"))
        case "poisoned batch" | "NaN gradient":
            how = chance.choice(("skip", "skip and kill", "roll back"))
            return chance.randint(save_every + 1 if how == "roll back" else 1, STEPS - 3), how
        case "shrink" | "grow":
            return chance.randint(2, 6), ""
        case _:
            return chance.randint(1, STEPS - 4), ""


def overrides(plan: Plan) -> list[str]:
    """The recipe's values of a run, but where it lies. A run that is compared with one on another layout draws nothing at random."""
    whole = 1216 + 256 * 4  # tokens of the ramp and of four steps behind it
    values = [
        "model.num_key_value_heads=2", "model.num_hidden_layers=2", "train.compile=false", "train.validate_every=100%",
            "train.validate_bytes_per_domain=600",
        "train.sample_every=100%",
        f"train.phases.general.tokens={whole + (256 * 12 if plan.resized else 0)} tokens", "train.phases.long.tokens=1536 tokens",
        f"model.residual_dropout={0.0 if plan.resized else 0.1}", "stability.spike=null",
    ]  # fmt: skip
    return values + [f"layout.{axis}={size}" for axis, size in plan.layout.items()]


def harmless(plan: Plan) -> list[str]:
    """What reaches no weight: when is saved, how long is waited."""
    return [
        f"train.save_every={plan.save_every} steps", f"checkpoints.asynchronous={str(plan.asynchronous).lower()}",
        f"stability.max_bad_steps={1 if plan.how == 'roll back' else 10}", "launch.timeout=20 s", "launch.max_restarts=20",
        "launch.exclude_after=100", "launch.grace_period=60 s",
    ]  # fmt: skip
