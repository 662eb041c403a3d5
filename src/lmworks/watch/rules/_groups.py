"""What the rules of reinforcement learning have in common: groups of answers without a signal, and the fate of their answers."""

from __future__ import annotations

from dataclasses import dataclass

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Measurement, NotJudged

FATES = ("wrong", "solved", "empty", "truncated", "unparsed", "failed")
EQUAL, _SHARE = 0.75, 0.7
_FEWEST = 8  # lines


@dataclass(frozen=True)
class Groups:
    """equal: share of the groups whose rewards are equal. fates: share of the answers by fate. reward: mean. All of the last half of the
    lines."""

    equal: float
    fates: dict[str, float]
    reward: float
    steps: tuple[int, int]

    def fate(self, *names: str) -> float:
        return sum(self.fates[name] for name in names)

    def measured(self, what: str, *names: str, high: float = _SHARE, equal: float = EQUAL) -> list[Measurement]:
        """The two measurements of a cause: no signal, and one fate for nearly all answers."""
        return [
            Measurement(
                "share of the groups whose rewards are equal",
                self.equal,
                high=equal,
                source="0.3 to 0.7 in published runs (arXiv:2503.14476)",
            ),
            Measurement(
                f"share of the answers that {what}",
                self.fate(*names),
                high=high,
                source="measured: at most 0.7 in healthy runs of make doctor",
            ),
        ]


def groups(evidence: Evidence, limit: float = EQUAL) -> Groups | None:
    """None if at most `limit` of the groups have equal rewards. Raises `NotJudged`."""
    equal = evidence.series("grpo/equal_groups").finite
    if len(equal) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines")
    late = equal.part(0.5, 1)
    if not late.mean > limit:
        return None
    fates = {name: one.mean if len(one := evidence.series(f"grpo/{name}").finite.part(0.5, 1)) else 0.0 for name in FATES}
    reward = evidence.series("grpo/reward").finite.part(0.5, 1)
    return Groups(late.mean, fates, reward.mean, (int(late.steps[0]), int(late.steps[-1])))
