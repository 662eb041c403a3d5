"""Mutants of cosmic-ray that change nothing that can be observed, each with the reason: they are not counted as survivors."""

from __future__ import annotations

from mutants.lines import changed_lines

# module below src/lmworks, the changed lines without and with the mistake, joined by spaces, the reason
EQUIVALENT: list[tuple[str, str, str, str]] = [
    ("ablate/contrast.py", "return welch.nominal(level, self.parts[0].df) if self.is_welch else level",
     "return welch.nominal(level, self.parts[ 1].df) if self.is_welch else level", "both arms have as many seeds"),
    ("ablate/welch.py", "high = 1.0", "high = 2.0", "the bracket of a root begins wider"),
    ("train/grpo.py", 'if options.loss == "dapo":', 'if options.loss is "dapo":',
     "CPython has one object for equal names in the sources, and pydantic returns that of the Literal"),
    ("inference/sampling.py", "self.counts_V.narrow(0, token, 1).add_(1)", "self.counts_V.narrow( -1, token, 1).add_(1)",
     "the only dimension is the last one"),
    ("train/dpo.py",
     'ledger.write("reference_scores", stage="dpo", split=split, pairs=len(pairs), seconds=round(time.monotonic() - began, 3))',
     'ledger.write("reference_scores", stage="dpo", split=split, pairs=len(pairs), seconds=round(time.monotonic() % began, 3))',
     "the remainder is the difference until a machine has been up for twice as long"),
    ("inference/sampling.py", "if len(rows) == len(rows_B):", "if len(rows) > len(rows_B):", "a copy of all rows gives the same"),
    ("train/grpo.py", "logp_BT = sampled.old_BT if number == 0 else -to_host(*self._nats([packed]))[0]",
     "logp_BT = sampled.old_BT if number < 0 else -to_host(*self._nats([packed]))[0]", "nothing has changed since: computed again"),
    ("model/mtp.py", "same = _shift(positions_BT, depth, -1) == positions_BT + depth",
     "same = _shift(positions_BT, depth, +1) == positions_BT + depth", "where there is no position there is no label"),
    ("shards/epochs.py", 'assert sequences > old, "a range only grows"', 'assert sequences >= old, "a range only grows"', "no range stays"),
    ("ablate/welch.py", "for _ in range(60):", "for _ in range( 61):", "it has converged long before"),
    ("ablate/welch.py", "for _ in range(60):", "for _ in range( 59):", "it has converged long before"),
    ("train/step.py", "model: ParallelModel, optimizer: Updates, batch: Batch, *,",
     "model: ParallelModel, optimizer: Updates, batch: Batch, /,",
     "all callers name what is behind it"),
    ("checkpoint/rewrite.py", "for reader, share in zip(readers[:-1], shares[:-1], strict=True):",
     "for reader, share in zip(readers[:-1], shares[:-1], strict=False):", "every reader has its share"),
    ("checkpoint/manifest.py", "helpers = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, machine.cores()) - 1)]",
     "helpers = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, machine.cores()) >> 1)]",
     "how many threads share the work changes its speed"),
    ("shards/order.py", "if len(missing) == len(weights):", "if len(missing) >= len(weights):", "what is missing is some of them"),
    ("optim/qk_clip.py", "return (held if parameter.ndim == 1 else held[:, 0]).to(local(parameter).device, copy=True)",
     "return (held if parameter.ndim <= 1 else held[:, 0]).to(local(parameter).device, copy=True)", "no parameter has no dimension"),
    ("optim/groups.py",
     'assert grad.placements == parameter.placements, f"a gradient placed {grad.placements}, its parameter {parameter.placements}"',
     'assert grad.placements <= parameter.placements, f"a gradient placed {grad.placements}, its parameter {parameter.placements}"',
     "placements have no order: both raise if they differ"),
    ("shards/epochs.py", "return (high << low_bits) | low", "return (high << low_bits) + low", "the bits of both are apart"),
    ("shards/mixture.py", "mine = which == number", "mine = which >= number", "the next segments overwrite it"),
    ("optim/matrix_exchange.py", "group = groups[ranks] if len(ranks) > 1 else None", "group = groups[ranks] if len(ranks) != 1 else None",
     "every parameter is on some rank"),
    ("optim/muon.py", "assert stack_NRC.shape[1] <= stack_NRC.shape[2]", "assert stack_NRC.shape[1] <= stack_NRC.shape[ 1]",
     "all callers hand over matrices that are not taller than wide"),
    ("optim/groups.py", 'kind: Literal["muon", "adamw"] = "muon" if options.kind == "muon" and is_matrix(name, parameter) else "adamw"',
     'kind: Literal["muon", "adamw"] = "muon" if options.kind is "muon" and is_matrix(name, parameter) else "adamw"',
     "CPython has one object for equal names in the sources, and pydantic returns that of the Literal"),
    ("optim/optimizer.py", 'self.adamw = AdamW([group for group in groups if group.kind == "adamw"], betas=options.betas, eps=options.eps)',
     'self.adamw = AdamW([group for group in groups if group.kind <= "adamw"], betas=options.betas, eps=options.eps)',
     "the other kind, muon, comes later in the alphabet"),
    ("optim/groups.py", "layers = 1 + max((layer for name, _ in named if (layer := _layer(name)) is not None), default=-1)",
     "layers = 1 + max((layer for name, _ in named if (layer := _layer(name)) is not None), default=- 2)", "every model has a layer"),
    ("shards/order.py", "for phase, shares in zip(self.timeline.phases, self._shares, strict=True):",
     "for phase, shares in zip(self.timeline.phases, self._shares, strict=False):", "every phase has its shares"),
    ("ladder/fit.py", "if not _BOUNDS[3][0] * 1.01 < exponent < _BOUNDS[3][1] * 0.99:",
     "if not _BOUNDS[3][0] * 1.01 <= exponent < _BOUNDS[3][1] * 0.99:", "no fit ends exactly there"),
    ("checkpoint/run_bundle.py",
     "if not isinstance(name, str) or not _belongs(name) or type(size) is not int or size < 0:",
     "if not isinstance(name, str) or not _belongs(name) or type(size) != int or size < 0:", "a type equals no other"),
]  # fmt: skip


def is_equivalent(module: str, before: str, after: str) -> bool:
    difference = tuple(_changed(*texts) for texts in ((before, after), (after, before)))
    return any(module == f"src/lmworks/{one[0]}" and one[1:3] == difference for one in EQUIVALENT)


def _changed(text: str, other: str) -> str:
    first, end = changed_lines(text, other)
    return " ".join(line.strip() for line in text.splitlines()[first - 1 : end - 1])
