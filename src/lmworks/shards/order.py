"""Promise 1: the sequences of a step are a function of (seed, phase, number of the sequence), and of nothing else.

The tokens of a source are divided among the phases that use it, as neighbouring ranges in proportion to how much of it each plans to
read, so that no phase sees the text of another. Inside a range of m tokens there are n = (m - 1) // L sequences of L + 1 tokens, each
beginning where the one before ends, and sharing one token with it: the last label here is the first input there. The k-th time that a
phase takes from a source is the k // n-th reading (epoch), and takes sequence permute(k % n) under a key of its own for that epoch.

Nothing here knows of ranks, micro-batches or restarts; there is nothing to save and nothing to load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from lmworks.errors import UserError
from lmworks.recipe.recipe import Recipe
from lmworks.recipe.training import Phase
from lmworks.shards.manifest import Manifest
from lmworks.shards.mixture import Mixture
from lmworks.shards.permute import derive_key, permute
from lmworks.shards.timeline import Timeline


@dataclass(frozen=True)
class Share:
    """What one phase reads of one source: the token range [start, stop), the sequences in it, and how many it plans to take."""

    phase: str
    source: str
    start: int
    stop: int
    sequences: int
    planned: int

    @property
    def epochs(self) -> float:
        """How often the range is read."""
        return self.planned / self.sequences if self.sequences else 0.0


@dataclass(frozen=True)
class Located:
    """Sequences found: index into `Order.sources`, epoch, number within the range, and first token in the source. All (n,) int64."""

    source: np.ndarray
    epoch: np.ndarray
    sequence: np.ndarray
    start: np.ndarray


class Order:
    """The order of all sequences of a run, in memory that does not grow with their number.

    `data` is the manifest of the shards or, for a plan before any exist, the tokens of each source by name.
    `left_out` names optional sources of the mixtures that could not be had; the others were scaled up in their place.
    """

    def __init__(self, recipe: Recipe, data: Manifest | Mapping[str, int]) -> None:
        tokens = data.train_tokens() if isinstance(data, Manifest) else dict(data)
        self.seed = recipe.seed
        self.timeline = Timeline(recipe.train.phases)
        optional = {source.name for source in recipe.corpus.sources if source.optional}
        self.left_out = sorted({name for phase in recipe.train.phases for name in phase.mixture if name not in tokens and name in optional})
        self.mixtures = [Mixture(_available(phase, tokens, optional)) for phase in recipe.train.phases]
        self.sources = sorted({name for mixture in self.mixtures for name in mixture.names})
        self._source_index = [np.array([self.sources.index(name) for name in mixture.names]) for mixture in self.mixtures]
        self._shares = self._allot(tokens)
        self._check(recipe.shards.max_epochs)
        self._hashes = _content(data) if isinstance(data, Manifest) else {}

    @property
    def steps(self) -> int:
        return self.timeline.steps

    def phase_of(self, step: int) -> int:
        """Index of the phase of a step; UserError outside the run."""
        return self.timeline.phase_of(step)

    def sequences(self, step: int) -> tuple[int, int]:
        """Number of the first sequence of a step, counted over all ranks from the start of its phase, and how many it has."""
        return self.timeline.sequences(step)

    def shares(self) -> list[Share]:
        """What each phase reads of each source, and how often."""
        return [share for phase in self._shares for share in phase]

    def locate(self, phase: int, g: np.ndarray) -> Located:
        """The sequences with numbers `g` (n,) of a phase."""
        turn, k = self.mixtures[phase].locate(g)
        length = self.timeline.phases[phase].sequence_length
        epoch, sequence, start = np.empty_like(k), np.empty_like(k), np.empty_like(k)
        for index in np.unique(turn):
            share = self._shares[phase][index]
            mine = np.flatnonzero(turn == index)
            epoch[mine], position = np.divmod(k[mine], share.sequences)
            for reading in np.unique(epoch[mine]):
                now = epoch[mine] == reading
                key = derive_key(self.seed, share.phase, share.source, int(reading))
                sequence[mine[now]] = permute(position[now], share.sequences, key)
            start[mine] = share.start + sequence[mine] * length
        return Located(self._source_index[phase][turn], epoch, sequence, start)

    def fingerprint(self) -> str:
        """Hex SHA-256 of all that decides any batch, the hashes of the token files included."""
        facts = {
            "seed": self.seed,
            "phases": [asdict(phase) for phase in self.timeline.phases],
            "mixtures": [dict(zip(mixture.names, mixture.slots.tolist(), strict=True)) for mixture in self.mixtures],
            "shares": [asdict(share) for share in self.shares()],
            "files": self._hashes,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _allot(self, tokens: Mapping[str, int]) -> list[list[Share]]:
        """Neighbouring ranges of each source for the phases, in proportion to planned use; whole numbers throughout."""
        planned = [mixture.counts(phase.sequences) for mixture, phase in zip(self.mixtures, self.timeline.phases, strict=True)]
        use: dict[str, list[int]] = {name: [0] * len(planned) for name in self.sources}
        for p, (mixture, phase) in enumerate(zip(self.mixtures, self.timeline.phases, strict=True)):
            for name, count in zip(mixture.names, planned[p].tolist(), strict=True):
                use[name][p] = count * phase.sequence_length
        shares: list[list[Share]] = []
        for p, (mixture, phase) in enumerate(zip(self.mixtures, self.timeline.phases, strict=True)):
            shares.append([])
            for name, count in zip(mixture.names, planned[p].tolist(), strict=True):
                total = max(sum(use[name]), 1)
                start = tokens[name] * sum(use[name][:p]) // total
                stop = tokens[name] * sum(use[name][: p + 1]) // total
                sequences = max(0, (stop - start - 1) // phase.sequence_length)
                shares[p].append(Share(phase.name, name, start, stop, sequences, count))
        return shares

    def _check(self, max_epochs: float) -> None:
        for phase, shares in zip(self.timeline.phases, self._shares, strict=True):
            for share in shares:
                if share.planned and not share.sequences:
                    raise UserError(
                        f"phase {share.phase}: its share of source {share.source} is {share.stop - share.start:,} tokens, less than one "
                        f"sequence of {phase.sequence_length:,}; add text, shorten sequence_length, or leave it out of the mixture"
                    )
                if share.epochs > max_epochs:
                    raise UserError(
                        f"phase {share.phase}: source {share.source} would be read {share.epochs:.1f} times, more than shards.max_epochs "
                        f"{max_epochs:g}; lower its weight, add text, or raise shards.max_epochs"
                    )


def _available(phase: Phase, tokens: Mapping[str, int], optional: set[str]) -> dict[str, float]:
    """The mixture without the optional sources that could not be had."""
    missing = [name for name in sorted(phase.mixture) if name not in tokens]
    needed = [name for name in missing if name not in optional]
    if needed:
        there = ", ".join(sorted(tokens)) or "none"
        raise UserError(f"phase {phase.name}: the mixture names source {needed[0]}, which has no tokens; there are: {there}")
    kept = {name: weight for name, weight in phase.mixture.items() if name in tokens}
    if not kept:
        raise UserError(f"phase {phase.name}: none of its sources could be had ({', '.join(missing)}); add one that is always there")
    return kept


def _content(manifest: Manifest) -> dict[str, list[str]]:
    return {source.name: [shard.sha256[".bin"] for shard in source.train.shards] for source in manifest.sources}
