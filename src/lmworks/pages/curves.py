"""Which charts a training stage gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lmworks.metrics.names import METRICS, is_score
from lmworks.pages.charts import Chart, Level, Line, Style, line_of
from lmworks.pages.run_records import Series, Training
from lmworks.ui.amounts import compact

TONES = 7  # c0 ... c6 in page.css
_FEW_LAYERS = 8
OVERALL = "overall"
_OTHER_TONES = (1, 3, 4, 2, 5, 6)  # of runs to compare with; the run's own is 0
_SHOWN = {"bytes": "bytes", "bytes/s": "bytes", "s": "seconds"}
_PRESSURES = (("cpu", "CPU", "c1"), ("memory", "memory", "c4"), ("io", "disks", "c3"))
_LEVEL_TONES = {"xz -9e": "l0", "PPMd": "l1", "byte unigram": "l2"}


class Curves:
    """The charts of one stage; each method returns those for which one of the runs has data. `others` are the same stage of the runs to
    compare with."""

    def __init__(self, training: Training, group: str, others: Sequence[tuple[str, Training]] = ()) -> None:
        self.training, self.group, self.others = training, group, others
        self.runs = (training, *(other for _, other in others))
        first = min((s.reach[0] for one in self.runs for s in one.series.values()), default=1.0)
        last = float(max(2, *(one.step for one in self.runs)))
        self.steps = (min(first, last - 1), last)
        self.quiet = [mark for mark in training.marks if mark.kind != "checkpoint"]

    def loss(self) -> list[Chart]:
        if self._objective:
            return self._plain("loss", "Objective", "What the stage minimizes.", [("train/loss", "objective", "c0")], wide=True)
        hint = "Cross-entropy in nats per token. Lower is better."
        lines = self._lines("train/loss", "loss", "c0", "smooth")
        top = _calm_top([y for line in lines for y in line.highs])
        more: dict[str, Any] = {"marks": self.training.marks, "wide": True, "name_phases": True, "top": top}
        return [self._chart("loss", "Training loss", hint, lines, unit="nats per token", **more)] if lines else []

    def held_out(self, references: dict[str, dict[str, float]], sizes: dict[str, int], sample: int) -> list[Chart]:
        """Bits per byte over all held-out text, then per domain, on one scale of their own each.

        What is measured on the way is a `sample` of so many bytes per domain. The references are of all held-out text, of which `sizes`
        has the bytes, so they are drawn only where that is the same text.
        """
        all_of_it = {domain: size <= sample for domain, size in sizes.items() if domain != OVERALL}
        all_of_it[OVERALL] = bool(all_of_it) and all(all_of_it.values())
        domains = {
            name.split("/")[1] if name.count("/") == 2 else OVERALL
            for name in self._names
            if name.startswith("validation/") and name.endswith("/bits_per_byte")
        }
        charts = []
        for domain in sorted(domains, key=lambda domain: (domain != OVERALL, domain)):
            levels = [
                Level(name, marks[domain], _LEVEL_TONES.get(name, "l2"))
                for name, marks in references.items()
                if isinstance(marks.get(domain), int | float) and all_of_it.get(domain)
            ]
            whole = domain == OVERALL
            if not whole:
                levels = [level for level in levels if level.name != "byte unigram"]  # far above all, and in the table
            hint = "Cross-entropy on held-out text in bits per byte; comparable across tokenizers."
            if not all_of_it.get(domain):
                hint += f" Measured during training on the same sample, at most {compact(sample)} bytes of each domain"
                hint += "; the table below compares the final models with compressors on all held-out text." if references else "."
            metric = "validation/bits_per_byte" if whole else f"validation/{domain}/bits_per_byte"
            lines = self._lines(metric, "model", "c0")
            more: dict[str, Any] = {"levels": levels, "wide": whole, "name_phases": whole, "marks": self.quiet if whole else []}
            title = "Held-out text of all domains" if whole else domain
            charts.append(self._chart(f"bpb-{domain}", title, hint if whole else "", lines, unit="bits per byte", **more))
        return charts

    def benchmarks(self) -> list[Chart]:
        """Evaluations in the loop: accuracy, and bits per byte of the right answers. A line per set, or a chart per set to compare runs."""
        names = sorted(name for name in self._names if name.startswith("eval/"))
        scores, bits = [name for name in names if is_score(name)], [name for name in names if name.endswith("/bits_per_byte")]
        hint = "Share of a small sample of each set that is right, in cloze form without examples, during training."
        charts = self._of_sets("benchmarks", "Benchmarks during training", hint, scores, shown="percent")
        hint = "Bits per byte of the right answers of the same items. Lower is better; it often falls before scores rise."
        return charts + self._of_sets("right-answers", "Right answers", hint, bits, unit="bits per byte")

    def _of_sets(self, name: str, title: str, hint: str, metrics: list[str], **more: Any) -> list[Chart]:
        labels = {metric: metric.split("/")[1] for metric in metrics}
        if self.others:
            return [
                self._chart(f"{name}-{label}", f"{title}: {label}", hint, self._lines(metric, label, "c0"), **more)
                for metric, label in labels.items()
            ]
        lines = [line for n, (metric, label) in enumerate(labels.items()) for line in self._lines(metric, label, f"c{n % TONES}")]
        return [self._chart(name, title, hint, lines, wide=True, **more)] if lines else []

    @property
    def _objective(self) -> bool:
        return any(one.has_objective for one in self.runs)

    @property
    def _names(self) -> list[str]:
        """The metrics that any of the runs has."""
        return list(dict.fromkeys(name for one in self.runs for name in one.series))

    def preferences(self) -> list[Chart]:
        """How preference optimization goes."""
        rewards = [("dpo/reward_chosen", "chosen", "c0"), ("dpo/reward_rejected", "rejected", "c1"), ("dpo/margin", "margin", "c2")]
        accuracy = [("validation/reward_accuracy", "held-out pairs", "c0"), ("dpo/accuracy", "pairs of the step", "c1")]
        hint = "Share of pairs whose chosen answer has the larger reward; 0.5 at the start."
        charts = self._plain("accuracy", "Reward accuracy", hint, accuracy, wide=True)
        charts += self._plain("rewards", "Rewards", "beta times the log-ratio to the reference.", rewards)
        return charts + self._plain("divergence", "Divergence", "kto's estimate, in nats.", [("dpo/divergence", "divergence", "c3")])

    def rewards(self) -> list[Chart]:
        """How reinforcement learning goes."""
        held_out = [("grpo/reward", "answers of the step", "c0"), ("validation/reward", "held-out prompts", "c1")]
        charts = self._plain("reward", "Reward", "Mean reward of an answer.", held_out, wide=True)
        names = ("solved", "wrong", "unparsed", "empty", "truncated", "failed")
        shares = [(f"grpo/{name}", name, f"c{tone}") for tone, name in enumerate(names)]
        charts += self._plain("answers", "Answers", "Share of the answers that were drawn.", shares)
        hint = "Share of the drawn groups whose rewards are equal, which teach nothing; 1: the step has no learning signal."
        charts += self._plain("groups", "Groups without a difference", hint, [("grpo/equal_groups", "equal groups", "c4")])
        mismatch = [("grpo/mismatch_max", "largest", "c0"), ("grpo/mismatch_mean", "mean", "c1")]
        hint = "Distance from 1 of the ratio of a token's probabilities in training and rollout."
        charts += self._plain("mismatch", "Training against rollout", hint, mismatch)
        charts += self._plain("tokens", "Length of answers", "Mean, in tokens.", [("grpo/answer_tokens", "tokens", "c2")])
        charts += self._plain("surprise", "Entropy", "Estimated from the drawn tokens.", [("grpo/surprise", "nats per token", "c3")])
        return charts

    def validation_loss(self) -> list[Chart]:
        wanted = [("validation/loss", "held-out loss", "c0")]
        if self._objective:
            charts = self._plain("validation", "Held-out loss", "The objective on held-out pairs.", wanted)
        else:
            charts = self._plain("validation", "Held-out loss", "Held-out cross-entropy, nats per token.", wanted, unit="nats per token")
        hint = "Cost of general text beside what it was when the stage began: a rise is what the model forgets."
        return charts + self._plain("forgetting", "Forgetting", hint, [("validation/forgetting", "rise", "c3")], unit="bits per byte")

    def optimizer(self) -> list[Chart]:
        charts = self._plain(
            "rate",
            "Learning rate",
            "What the schedule asks for.",
            [("optim/learning_rate", "matrices", "c0"), ("optim/adam_learning_rate", "embeddings, norms", "c1")],
            zero=True,
        )
        if lines := self._lines("optim/grad_norm", "gradient norm", "c2", "smooth"):
            hint = "Global gradient norm before clipping. Spikes often precede loss spikes."
            charts.append(self._chart("norm", "Gradient norm", hint, lines, log_y=_spans(lines[0]), marks=self.quiet))
        charts += self._plain("z", "z-loss", "Squared log-partition of the head, before its weight.", [("train/z_loss", "z-loss", "c3")])
        charts += self._plain("scale", "Loss scale", "Dynamic scale of fp16.", [("optim/loss_scale", "scale", "c4")], log_y=True)
        return charts

    def experts(self) -> list[Chart]:
        layers = self._layers("experts/load_cv/")
        charts: list[Chart] = []
        if lines := [*self._layer_lines(layers), *self._lines("experts/load_cv", "mean", "ink")]:
            hint = "Coefficient of variation of the experts' loads in each layer: 0 is perfect balance."
            charts.append(self._chart("cv", "Load imbalance", hint, lines, zero=True, marks=self.quiet))
        if layers:
            hint = "The same by layer, first layer on top. Light colors are balanced."
            rows = [line_of(one, name, "c0") for name, one in layers.items()]
            charts.append(self._chart("cv-heat", "Load imbalance by layer", hint, rows, unit="layer", rows=True))
        charts += self._plain(
            "ratio",
            "Busiest and idlest expert",
            "Load relative to the mean of its layer, worst layer.",
            [("experts/load_max", "busiest", "c1"), ("experts/load_min", "idlest", "c0")],
            zero=True,
            levels=[Level("mean load", 1.0, "l2")],
        )
        charts += self._plain(
            "bias",
            "Selection bias",
            "Largest absolute selection bias of the routers, over all layers.",
            [("experts/bias_max", "largest bias", "c4")],
            zero=True,
        )
        charts += self._plain(
            "dead", "Dead experts", "Experts that got no token in a step, over all layers.", [("experts/dead", "dead", "c3")], zero=True
        )
        charts += self._plain(
            "overflow",
            "Overflow",
            "Fraction of routed tokens above the capacity factor.",
            [("experts/overflow", "overflow", "c5")],
            shown="percent",
            zero=True,
        )
        return charts

    def machine(self) -> list[Chart]:
        charts = []
        if lines := self._lines("perf/tokens_per_second", "tokens per second", "c0", "smooth"):
            hint = "Tokens per second, without saves and validation."
            charts.append(self._chart("speed", "Throughput", hint, lines, shown="compact", zero=True))
        charts += self._plain(
            "mfu",
            "Model FLOPs utilization",
            "Fraction of this machine's measured matrix-multiply peak.",
            [("perf/mfu", "MFU", "c2")],
            shown="percent",
            zero=True,
        )
        busy = [("perf/gpu_utilization", "computing", "c3")]
        hint = "Share of the last second in which the GPU computed."
        charts += self._plain("busy", "GPU utilization", hint, busy, shown="percent", zero=True)
        charts += self._plain(
            "wait",
            "Data wait",
            "Time that steps waited for their batch.",
            [("perf/data_wait", "wait", "c1")],
            shown="seconds",
            zero=True,
        )
        memory = [("perf/memory", "memory", "c4")]
        charts += self._plain("memory", "Memory of training", "Largest in use by a rank.", memory, shown="bytes", zero=True)
        charts += self._plain(
            "pauses",
            "Pauses",
            "Time for which training stood still.",
            [("perf/save_seconds", "saving", "c3"), ("perf/validation_seconds", "validation", "c0"),
             ("perf/evaluation_seconds", "evaluation", "c2"), ("perf/gap_seconds", "unexplained", "c5")],
            shown="seconds",
            zero=True,
        )
        pressures = [(f"system/{name}_pressure", label, tone) for name, label, tone in _PRESSURES]
        hint = "Share of the time in which some task of the machine waited for a resource."
        charts += self._plain("pressure", "Pressure", hint, pressures, shown="percent", zero=True)
        drawn, names = {metric for metric, *_ in pressures}, self._names
        for metric in (name for name in METRICS if name.startswith("system/") and name in names and name not in drawn):
            known, name = METRICS[metric], metric.removeprefix("system/")
            shown = _SHOWN.get(known.unit, "number")
            title = "System " + " ".join(word.upper() if word in ("cpu", "gpu") else word for word in name.split("_"))
            hint = f"{known.meaning[:1].upper()}{known.meaning[1:]}."
            unit = "" if shown != "number" else known.unit
            charts += self._plain(f"system-{name}", title, hint, [(metric, title, "c1")], shown=shown, unit=unit)
        return charts

    def _lines(self, metric: str, name: str, tone: str, style: Style = "line") -> list[Line]:
        """A metric of the run, if it has it, and of those to compare with."""
        own = self.training.series.get(metric)
        return ([] if own is None else [line_of(own, name, tone, style)]) + self._others(metric)

    def _others(self, metric: str) -> list[Line]:
        """The same of the runs to compare with."""
        found = [(n, name, other.series[metric]) for n, (name, other) in enumerate(self.others, 1) if metric in other.series]
        return [line_of(one, name, f"c{_OTHER_TONES[(n - 1) % len(_OTHER_TONES)]}", "dashed", run=n) for n, name, one in found]

    def _chart(self, name: str, title: str, hint: str, lines: list[Line], **more: Any) -> Chart:
        return Chart(f"{self.group}-{name}", title, hint, lines, self.steps, group=self.group, phases=self.training.phases, **more)

    def _plain(self, name: str, title: str, hint: str, wanted: list[tuple[str, str, str]], **more: Any) -> list[Chart]:
        lines: list[Line] = []
        for metric, label, tone in wanted:
            one = self.training.series.get(metric)
            if one is None or any(line.finite == one.means() for line in lines):  # as where one rate is for everything
                continue
            lines.append(line_of(one, label, tone))
        if len(lines) == 1 < len(wanted):
            lines = [replace(lines[0], name=title.lower())]
        lines += self._others(next((metric for metric, *_ in wanted if metric in self._names), ""))
        return [self._chart(name, title, hint, lines, **more)] if lines else []

    def _layers(self, prefix: str) -> dict[str, Series]:
        found = {name.removeprefix(prefix): one for name, one in self.training.series.items() if name.startswith(prefix)}
        return dict(sorted(found.items(), key=lambda pair: (len(pair[0]), pair[0])))

    def _layer_lines(self, layers: dict[str, Series]) -> list[Line]:
        few = len(layers) <= _FEW_LAYERS
        return [
            line_of(one, f"layer {name}", f"c{n % TONES}" if few else "c6", "thin" if few else "faint", named=few)
            for n, (name, one) in enumerate(layers.items())
        ]


def _calm_top(highs: list[float]) -> float | None:
    """A top for the y axis that the first few points, or a spike, do not set; None where nothing sticks out."""
    if not highs:
        return None
    values = sorted(highs)
    high = values[int(0.99 * (len(values) - 1))]
    return None if values[-1] <= 1.15 * high else high + 0.1 * (high - values[0])


def _spans(line: Line) -> bool:
    low, high = min(line.lows, default=0.0), max(line.highs, default=0.0)
    return low > 0 and high > 20 * low
