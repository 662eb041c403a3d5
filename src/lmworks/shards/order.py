"""Promise 1: the sequences of a step are a function of (seed, phase, number of the sequence), and of nothing else.

The tokens of a source are divided among the phases that use it, into adjacent ranges in proportion to how much of it each phase plans to
read, so that no phase reads the text of another. The k-th sequence that a phase draws from a source belongs to epoch k // n over the n
sequences of its range. It is sequence permute(k % n), under a key of that epoch. The packing defines the sequences: with `concatenate` a
range of m tokens holds n = (m - 1) // L sequences of L + 1 tokens, and neighbors share one token (the last label of one is the first input
of the next). With `best_fit` a sequence is a row of whole documents.

If the mixture or the recipe is changed while the run is in progress, ranges that a phase has begun to read stay as they are; only the other
ranges are divided again. A phase that is added where no text is left goes on with what an earlier one of its sequence length has not read;
one of another length reads the whole source. The order does not depend on ranks, micro-batches or restarts, and it has no state to save.
`lmworks.shards.order` describes the way from a step to the sequences that a rank reads.

Which sequences a rank reads in a step.

1. `Timeline.sequences(step)`: the number of the first sequence of the step, counted over all ranks from the start of its phase, and the
   number of sequences in the step.
2. `sequences_of_rank`: the part of these that a rank reads. Only the data-parallel axis counts: ranks that differ in their place on the
   tensor, context or pipeline axis read the same sequences.
3. `Batches.batch(step, start, stop)`: `Order.locate` finds these sequences in the token files, and they are read.
4. `micro_batches` (in `lmworks.parallel`): the rank goes through its sequences in their order, `micro_batch_size` at a time.

`ParallelModel` calls step 2 for the mesh that it runs on, and the trainer passes the result to step 3.

Warnings about sources that a run reads too often.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import expand_buckets
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.timeline import Growth, PhaseSteps, Timeline
from lmworks.shards.epochs import EpochOrder
from lmworks.shards.manifest import Manifest
from lmworks.shards.mixture import Mixture, MixturePlan

CountSequences = Callable[[str, Sequence[int], int], int]
"""(source, borders, sequence length) -> the number of sequences between the first and the last border."""


@dataclass(frozen=True)
class MixtureOverride:
    """A change of the mixture that was requested during the run. It holds from `step` on, up to the next change in the recipe."""

    step: int
    mixture: Mapping[str, float]


@dataclass(frozen=True)
class KeptRanges:
    """The ranges of the phases that were begun before `step`, when the recipe was changed: it does not move them.

    `ranges` are, by phase and source, the borders and the state of the `EpochOrder`. `files` are the hashes of the token files; a source
    that has others now is divided anew, since its documents lie elsewhere.
    """

    step: int
    ranges: Mapping[str, Mapping[str, Mapping[str, Any]]]
    files: Mapping[str, Sequence[str]]


OrderChange = MixtureOverride | KeptRanges


@dataclass(frozen=True)
class Share:
    """The range of one source that one phase reads: tokens from the first to the last of `borders`.

    `sequences` is how many sequences the range holds, `planned` how many the phase draws. Inner borders are where a change of the mixture
    extended the range.
    """

    phase: str
    source: str
    borders: tuple[int, ...]
    sequences: int
    planned: int

    @property
    def start(self) -> int:
        return self.borders[0]

    @property
    def stop(self) -> int:
        return self.borders[-1]

    @property
    def epochs(self) -> float:
        """How many times the range is read."""
        return self.planned / self.sequences if self.sequences else 0.0


@dataclass(frozen=True)
class LocatedSequences:
    """The place of n sequences: index into `Order.sources`, epoch, index within the range, and first token in the source (-1 with
    `best_fit`, which does not read in file order). All (n,) int64."""

    source: np.ndarray
    epoch: np.ndarray
    sequence: np.ndarray
    start: np.ndarray


class Order:
    """The order of all sequences of a run, in memory that does not grow with their number.

    `data` is the manifest of the shards or, for a plan before they exist, the tokens of each source by name.
    `changes` are the changes of the mixture that were requested during the run, and the ranges that a change of the recipe has kept, of
    which the last in the list count. `growths` are those of the batch (`lmworks.watch.batch_growth`): which sequences a step has depends on
    them, and nothing else does.
    `count_sequences` counts the sequences of a range; the default counts those of `concatenate`, an estimate for `best_fit`.
    `left_out` names optional sources of the mixtures that are not available; the weights of the others were scaled up.
    """

    def __init__(
        self, recipe: Recipe, data: Manifest | Mapping[str, int], changes: Sequence[OrderChange] = (),
        count_sequences: CountSequences | None = None, growths: Sequence[Growth] = (),
    ) -> None:  # fmt: skip
        self._tokens = data.train_tokens() if isinstance(data, Manifest) else dict(data)
        self._count_sequences = count_sequences or (lambda source, borders, length: max(0, (borders[-1] - borders[0] - 1) // length))
        self._hashes = _content(data) if isinstance(data, Manifest) else {}
        self.seed, self.packing = recipe.training_seed, recipe.shards.packing
        self.timeline = Timeline(recipe.train.phases, growths)
        self._declared = recipe.corpus.sources
        self.left_out: list[str] = []
        # Without growths: a planned change of the mixture keeps its place, in sequences, when the batch grows.
        self.mixtures = [self._plan(phase, PhaseSteps.of(phase)) for phase in recipe.train.phases]
        in_order = sorted((one for one in changes if isinstance(one, MixtureOverride)), key=lambda change: change.step)
        requested = [(change.step, self._mixture(f"step {change.step}", change.mixture)) for change in in_order]
        names = [plan.names for plan in self.mixtures] + [mixture.names for _, mixture in requested]
        self.sources = sorted(set().union(*names))
        self._shares: list[dict[str, Share]] = [{} for _ in self.mixtures]
        self._epoch_orders: list[dict[str, EpochOrder]] = [{} for _ in self.mixtures]
        self._kept = next((one for one in reversed(changes) if isinstance(one, KeptRanges)), None)
        since = 0 if self._kept is None else self._kept.step
        for step, mixture in requested:
            if step < since:  # the ranges that were kept then are those after this change
                self._draw(step, mixture)
        planned = [self._planned(number) for number in range(len(self.mixtures))]
        for source in self.sources:
            if self._kept is None or self._kept.files.get(source) != self._hashes.get(source):
                self._divide(source, planned, 0)
            else:
                self._keep(source, planned, self._kept)
        for step, mixture in requested:
            if step >= since:
                self._change(step, mixture)
        self._source_index = [np.array([self.sources.index(name) for name in plan.names]) for plan in self.mixtures]
        self._check(recipe.shards.max_epochs)

    @property
    def steps(self) -> int:
        return self.timeline.steps

    def phase_of(self, step: int) -> int:
        """Index of the phase of a step; UserError outside the run."""
        return self.timeline.phase_of(step)

    def mixture_since(self, step: int) -> int:
        """The first step that draws with the mixture that `step` draws with."""
        phase = self.phase_of(step)
        begun = self.timeline.phases[phase]
        drawn = max(first for first, _ in self.mixtures[phase].segments if first <= self.timeline.sequences(step)[0])
        return self.timeline.first_step(phase) + bisect_left(range(begun.steps), drawn, key=begun.before)

    def sequences(self, step: int) -> tuple[int, int]:
        """Number of the first sequence of a step, counted over all ranks from the start of its phase, and how many it has."""
        return self.timeline.sequences(step)

    def shares(self) -> list[Share]:
        """The share of each phase in each of its sources."""
        return [self._shares[phase][name] for phase, plan in enumerate(self.mixtures) for name in plan.names]

    def share(self, phase: int, source: str) -> Share:
        return self._shares[phase][source]

    def length_of(self, phase: str) -> int:
        """The sequence length of a phase."""
        return next(one.sequence_length for one in self.timeline.phases if one.name == phase)

    def locate(self, phase: int, g: np.ndarray) -> LocatedSequences:
        """The sequences with numbers `g` (n,) of a phase."""
        plan = self.mixtures[phase]
        turn, k = plan.locate(g)
        length = self.timeline.phases[phase].sequence_length
        epoch, sequence, start = np.empty_like(k), np.empty_like(k), np.full_like(k, -1)
        for index in np.unique(turn):
            name = plan.names[index]
            mine = np.flatnonzero(turn == index)
            sequence[mine], epoch[mine] = self._epoch_orders[phase][name].locate(k[mine])
            if self.packing == "concatenate":
                start[mine] = self._shares[phase][name].start + sequence[mine] * length
        return LocatedSequences(self._source_index[phase][turn], epoch, sequence, start)

    def kept(self, step: int) -> KeptRanges:
        """The ranges of the phases that have begun before `step`, which may be the number of steps, for an order of another recipe."""
        ranges: dict[str, dict[str, Any]] = {}
        for number, phase in enumerate(self.timeline.phases):
            if self.timeline.first_step(number) < step:
                ranges[phase.name] = {
                    source: {"borders": list(share.borders), **self._epoch_orders[number][source].state}
                    for source, share in self._shares[number].items()
                    if share.stop > share.start
                }
        return KeptRanges(step, ranges, self._hashes)

    def read_again(self) -> Iterator[tuple[str, str, float]]:
        """Phases that were added where no text was left and read that of earlier phases: (phase, source, how much of it was read)."""
        for number, phase in enumerate(self.timeline.phases):
            for source, share in self._shares[number].items():
                before = [(one, self._shares[one][source]) for one in range(number)]
                again = share.planned and any(share.start < other.stop and other.planned for _, other in before)
                if again and self._epoch_orders[number][source].phase == phase.name:
                    tokens = sum(other.planned * self.timeline.phases[one].sequence_length for one, other in before)
                    yield phase.name, source, min(1.0, tokens / self._tokens[source])

    def epochs_by_source(self) -> dict[str, float]:
        """How many times the tokens of each source are read over all phases, on average."""
        read = dict.fromkeys(self.sources, 0)
        for phase, shares in zip(self.timeline.phases, self._shares, strict=True):
            for name, share in shares.items():
                read[name] += share.planned * phase.sequence_length
        return {name: tokens / max(1, self._tokens[name]) for name, tokens in read.items()}

    def fingerprint(self) -> str:
        """Hex SHA-256 of everything that determines the batches, including the hashes of the token files."""
        facts = {
            "seed": self.seed,
            "packing": self.packing,
            "phases": [asdict(phase) for phase in self.timeline.phases],
            "mixtures": [
                [[first, dict(zip(mixture.names, mixture.slots.tolist(), strict=True))] for first, mixture in plan.segments]
                for plan in self.mixtures
            ],
            "shares": [asdict(share) for share in self.shares()],
            "files": self._hashes,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _plan(self, phase: Phase, steps: PhaseSteps) -> MixturePlan:
        """The mixtures that the recipe plans for a phase."""
        plan = MixturePlan([(0, self._mixture(f"phase {phase.name}", phase.mixture))])
        before = 0
        for change in phase.mixture_changes:
            step = steps.step_at(change.at)
            if not before < step < steps.steps:
                raise UserError(
                    f"phase {phase.name}: the mixture change at {change.at.text()} falls on step {step} of the phase's {steps.steps}; "
                    "changes must be in order, inside the phase and at different steps"
                )
            plan, before = plan.changed(steps.before(step), self._mixture(f"phase {phase.name}", change.mixture)), step
        return plan

    def _mixture(self, where: str, weights: Mapping[str, float]) -> Mixture:
        """The mixture with bucketed sources expanded into their buckets, and without the optional sources that are not available."""
        optional = {name for source in self._declared if source.optional for name in (source.name, *source.outputs)}
        weights = expand_buckets(weights, self._declared, self._tokens)
        missing = [name for name in sorted(weights) if name not in self._tokens]
        needed = [name for name in missing if name not in optional]
        if needed:
            available = ", ".join(sorted(self._tokens)) or "none"
            raise UserError(f"{where}: the mixture names source {needed[0]}, which has no tokens; available: {available}")
        if len(missing) == len(weights):
            raise UserError(f"{where}: none of its sources is available ({', '.join(missing)}); add one that is not optional")
        self.left_out = sorted({*self.left_out, *missing})
        return Mixture({name: weight for name, weight in weights.items() if name in self._tokens})

    def _draw(self, step: int, mixture: Mixture) -> None:
        """Draw with other weights from a step on."""
        phase = self.phase_of(step)
        self.mixtures[phase] = self.mixtures[phase].changed(self.timeline.sequences(step)[0], mixture)

    def _change(self, step: int, mixture: Mixture) -> None:
        """Draw with other weights from a step on. Sequences before it, and ranges that were begun, do not change."""
        phase = self.phase_of(step)
        first = self.timeline.sequences(step)[0]
        taken = self._planned(phase, first) if first else None
        before = [self._planned(number) for number in range(len(self.mixtures))]
        self._draw(step, mixture)
        after = [self._planned(number) for number in range(len(self.mixtures))]
        for source in self.sources:
            if [counts.get(source, 0) for counts in before] != [counts.get(source, 0) for counts in after]:
                self._divide(source, after, phase, None if taken is None else taken.get(source, 0))

    def _keep(self, source: str, planned: Sequence[Mapping[str, int]], kept: KeptRanges) -> None:
        """Keep the ranges of phases that have begun, and divide the other text of a source among the rest."""
        timeline, end = self.timeline, 0
        begun = [number for number in range(len(timeline.phases)) if timeline.first_step(number) < kept.step]
        for number in begun:
            name, length = timeline.phases[number].name, timeline.phases[number].sequence_length
            was = kept.ranges.get(name, {}).get(source)
            borders = (end, end) if was is None else tuple(was["borders"])
            order = EpochOrder(self.seed, name, source, 0) if was is None else EpochOrder.of_state(self.seed, source, was)
            sequences = self._count_sequences(source, borders, length) if was else 0
            self._epoch_orders[number][source] = order
            self._shares[number][source] = Share(name, source, borders, sequences, planned[number].get(source, 0))
            end = max(end, borders[-1])
        now, taken = len(begun), None
        if begun and kept.step < timeline.first_step(now):  # inside the last of them
            now, inside = now - 1, kept.step - timeline.first_step(now - 1)
            taken = self._planned(now, timeline.phases[now].before(inside)).get(source, 0)
        self._divide(source, planned, now, taken)

    def _planned(self, phase: int, prefix: int | None = None) -> dict[str, int]:
        """How many of the first `prefix` sequences of a phase (default: all) come from each source."""
        plan, prefix = self.mixtures[phase], self.timeline.phases[phase].sequences if prefix is None else prefix
        return dict(zip(plan.names, plan.counts(prefix).tolist(), strict=True))

    def _divide(self, source: str, planned: Sequence[Mapping[str, int]], now: int, taken: int | None = None) -> None:
        """Divide the tokens of a source that phases before `now` have left among the other phases, in proportion to planned use.

        If phase `now` has already drawn `taken` sequences, it keeps its range; the range is extended if it is smaller than its share. All
        arithmetic is in integers.
        """
        phases, tokens = self.timeline.phases, self._tokens.get(source, 0)
        count = [counts.get(source, 0) for counts in planned]
        use = [number * phase.sequence_length for number, phase in zip(count, phases, strict=True)]
        start = max((self._shares[number][source].stop for number in range(now)), default=0)
        for number in range(now, len(phases)):
            left = sum(use[number:])
            old = self._shares[number][source] if number == now and taken is not None else None
            if old is None and use[number] and self._is_used_up(tokens - start, left, tokens, sum(use)):
                self._share_begun(source, number, count[number])
                continue
            stop = start + (tokens - start) * use[number] // left if left else start
            borders: tuple[int, ...] = (start, stop)
            if old:
                borders = (*old.borders, stop) if stop > old.stop >= start else old.borders
            sequences = self._count_sequences(source, borders, phases[number].sequence_length) if stop > start or old else 0
            if old is None or taken is None:
                self._epoch_orders[number][source] = EpochOrder(self.seed, phases[number].name, source, sequences)
            elif sequences > old.sequences:
                self._epoch_orders[number][source].extend(taken, sequences)
            else:
                borders, sequences = old.borders, old.sequences
            self._shares[number][source] = Share(phases[number].name, source, borders, sequences, count[number])
            start = max(start, borders[-1])

    def _is_used_up(self, unread: int, left: int, tokens: int, use: int) -> bool:
        """Whether the phases of a changed recipe that are to come, which read `left` tokens of a source, find so little text that none has
        begun that they would read it more often than once, and than the source is read on average."""
        return self._kept is not None and left > unread and left * tokens * 10 > use * unread * 11

    def _share_begun(self, source: str, number: int, count: int) -> None:
        """Give a phase the text of earlier ones: what one of its sequence length has not read, or the whole source."""
        phase = self.timeline.phases[number]
        drawn: dict[str, int] = {}  # of each order, by the phases so far
        for one in range(number):
            order = self._epoch_orders[one][source]
            drawn[order.phase] = max(drawn.get(order.phase, 0), order.begin + self._shares[one][source].planned)
        for one in reversed(range(number)):
            before, share = self._epoch_orders[one][source], self._shares[one][source]
            if self.timeline.phases[one].sequence_length == phase.sequence_length and drawn[before.phase] < before.sequences:
                order = EpochOrder.of_state(self.seed, source, {**before.state, "begin": drawn[before.phase]})
                borders, sequences = share.borders, share.sequences
                break
        else:
            borders = (0, self._tokens.get(source, 0))
            sequences = self._count_sequences(source, borders, phase.sequence_length)
            order = EpochOrder(self.seed, phase.name, source, sequences)
        self._epoch_orders[number][source] = order
        self._shares[number][source] = Share(phase.name, source, borders, sequences, count)

    def _check(self, max_epochs: float) -> None:
        for share in self.shares():
            if share.planned and not share.sequences:
                raise UserError(
                    f"phase {share.phase}: its share of source {share.source} is {share.stop - share.start:,} tokens, less than one "
                    f"sequence of {self.length_of(share.phase):,}; add text, shorten sequence_length, or leave it out of the mixture"
                )
        short = [share for share in self.shares() if share.epochs > max_epochs]
        if short:
            named = ", ".join(f"{share.source} {share.epochs:.1f} times in phase {share.phase}" for share in short)
            raise UserError(
                f"too little text for the budget: sources would be read more often than shards.max_epochs {max_epochs:g} ({named}); "
                "add text, lower tokens or their weights, or raise shards.max_epochs"
            )


def _content(manifest: Manifest) -> dict[str, list[str]]:
    return {source.name: [shard.sha256[".bin"] for shard in source.train.shards] for source in manifest.sources}


def sequences_of_rank(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """The sequences [start, stop), of the `count` sequences of a step, that `rank` of `ranks` data-parallel ranks reads.

    Ranks read contiguous ranges in rank order; their sizes differ by one at most.
    """
    return rank * count // ranks, (rank + 1) * count // ranks


def epoch_warnings(order: Order, most: float) -> Iterator[str]:
    """A line for each source that a phase reads more than `most` times. Phases share no text, so that all of them together read no source
    more often than one of them does, but for phases that were added later."""
    for phase, source, read in order.read_again():
        yield (
            f"phase {phase} was added when no text of source {source} was left; it reads text of earlier phases again, which have read "
            f"{read:.0%} of it"
        )
    for share in order.shares():
        if share.epochs > most:
            yield f"phase {share.phase} reads source {share.source} {share.epochs:.1f} times, more than shards.warn_epochs {most:g}"
