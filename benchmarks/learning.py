"""What lmworks and nanochat learn from the same number of tokens at the same size, one core each, on text that they have not seen.

    python benchmarks/learning.py runs/learning --nanochat FOLDER --packages FOLDER --text wikitext=FILE --text shakespeare=FILE
    python benchmarks/learning.py runs/learning --table

nanochat is a checkout of github.com/karpathy/nanochat, whose own scripts are run as they are; `--packages` has rustbpe 0.1.0, filelock,
kernels and an empty package `wandb`. Both read the quickstart's corpus in its mixture, with a vocabulary of 4,096 and rows of 256 tokens.
nanochat gets documents cut to 750 characters: its loader fills a row from the start of a document and discards the rest, which long
documents lose at short rows. It seeds its weights itself, so that its seeds differ in the order of documents only. Its rates are multiples
of its defaults, ours of the recipe's.

Scored in fp32 by windows of 256 tokens on the held-out text of the corpus and on other texts, of which a `--text` is a file that neither
has seen. nanochat reads its BOS token before each document, which costs it nothing; our first token costs log2(vocabulary) bits. Every run
is a line of OUT/results.jsonl, and what is there is not repeated. `--only TEXT` runs some; `--core N` binds them to a core. `--without
softcap softcap,scalars` adds runs of nanochat without the first and without both, which we cannot export (`nanochat_parts.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanochat_parts import PARTS, leave_out

WIDTHS = {"1M": (128, 2), "4M": (256, 4), "16M": (384, 6)}
RATES: dict[str, tuple[float, ...]] = {"lmworks": (0.5, 1.0, 2.0), "lmworks-dense": (0.5, 1.0, 2.0), "nanochat": (2.0, 4.0, 8.0)}
VOCABULARY, LENGTH, CHARACTERS = 4096, 256, 750
RATE, BATCH = 0.011, 8192  # of the quickstart; nanochat has --batch
_ANNEAL = 0.135  # of the tokens, as in the quickstart
_NANOCHAT_RATES = {"matrix": 0.02, "embedding": 0.3, "unembedding": 0.008}  # its defaults
_SPARE = 1.6  # times the bytes that a run reads at four bytes a token: nanochat crops what does not fit a row


@dataclass(frozen=True)
class Job:
    side: str
    size: str
    tokens: int
    rate: float
    seed: int
    batch: int = BATCH  # tokens of a step

    @property
    def without(self) -> str:
        """The parts that nanochat is trained without, separated by commas."""
        return self.side.partition("-without-")[2]

    @property
    def name(self) -> str:
        return f"{self.side}-{self.size}-{self.tokens}-b{self.batch}-x{self.rate:g}-seed{self.seed}"


def corpus(out: Path, seed: int) -> Path:
    """The run of a seed with the quickstart's corpus, tokenizer and shards. The seed decides which documents are held out."""
    run, sets = base_of(out, seed), (f"run_dir={base_of(out, seed)}", f"seed={seed}")
    words = [word for one in sets for word in ("--set", one)]
    call([sys.executable, "-m", "lmworks.cli.main", "run", "quickstart", "--to", "shards", *words], out / f"{run.name}.log")
    return run


def base_of(out: Path, seed: int) -> Path:
    return out / f"base-seed{seed}"


def call(command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> float:
    """Run a command with its output in a file; returns the seconds of processor time that it took."""
    log.parent.mkdir(parents=True, exist_ok=True)
    before = os.times()
    with open(log, "ab") as file:
        done = subprocess.run([str(one) for one in command], stdout=file, stderr=file, env={**os.environ, **(env or {})}, cwd=cwd)
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}; its output is in {log}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def documents(run: Path, seed: int, size: int) -> Iterator[str]:
    """Pieces of at most `CHARACTERS` characters in the mixture of the quickstart, `size` bytes of them, shuffled; texts that are used up
    come again, as in our order."""
    import pyarrow.parquet as pq

    from lmworks.recipe.load import load_recipe

    mixture = load_recipe("quickstart").recipe.train.phases[0].mixture
    draw = random.Random(seed)
    pieces: list[str] = []
    for source, share in mixture.items():
        files = sorted((run / "corpus" / "train" / source).glob("*.parquet"))
        texts = [text for file in files for text in pq.read_table(file, columns=["text"])["text"].to_pylist()]
        own = [text[at : at + CHARACTERS] for text in texts for at in range(0, len(text), CHARACTERS)]
        wanted = share * size
        while wanted > 0:
            draw.shuffle(own)
            for piece in own:
                pieces.append(piece)
                wanted -= len(piece.encode())
                if wanted <= 0:
                    break
    draw.shuffle(pieces)
    yield from pieces


class Nanochat:
    def __init__(self, folder: Path, packages: Path, out: Path) -> None:
        self.folder, self.packages, self.out = folder.resolve(), packages.resolve(), out.resolve()

    def environment(self, base: Path) -> dict[str, str]:
        import torch

        from lmworks.host.devices import dtype_for

        kind = str(dtype_for("auto", torch.device("cpu"))).removeprefix("torch.")  # as lmworks: fp32 where a processor has no bf16 products
        return {"NANOCHAT_BASE_DIR": str(base), "NANOCHAT_DTYPE": kind, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled",
                "PYTHONPATH": os.pathsep.join((str(self.folder), str(self.packages)))}  # fmt: skip

    def base(self, run: Path, job: Job) -> Path:
        """The folder of a seed with its data and tokenizer."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        base = self.out / "nanochat" / f"{job.tokens}-seed{job.seed}"
        if (base / "tokenizer" / "tokenizer.pkl").exists():
            return base
        data = base / "base_data_climbmix"
        data.mkdir(parents=True, exist_ok=True)
        pieces = [*documents(run, job.seed, int(_SPARE * 4 * job.tokens))]
        for number, part in enumerate((pieces[:-64], pieces[-64:])):
            pq.write_table(pa.table({"text": part}), data / f"shard_{number:05d}.parquet", row_group_size=1024)
        call([sys.executable, "-m", "scripts.tok_train", f"--vocab-size={VOCABULARY}"], base / "log", self.environment(base), self.folder)
        return base

    def train(self, run: Path, job: Job) -> dict[str, Any]:
        base, (width, depth) = self.base(run, job), WIDTHS[job.size]
        log = base / f"{job.name}.log"
        log.unlink(missing_ok=True)
        rates = [f"--{name}-lr={job.rate * rate:g}" for name, rate in _NANOCHAT_RATES.items()]
        module = [Path(__file__).with_name("nanochat_parts.py"), job.without] if job.without else ["-m"]
        if "weight-decay" in job.without:
            rates.append("--weight-decay=0")
        seconds = call(
            [sys.executable, *module, "scripts.base_train", "--device-type=cpu", f"--depth={depth}", f"--aspect-ratio={width // depth}",
             "--head-dim=64", "--window-pattern=L", f"--max-seq-len={LENGTH}", f"--device-batch-size={job.batch // LENGTH}",
             f"--total-batch-size={job.batch}", f"--num-iterations={job.tokens // job.batch}", "--eval-every=-1", "--core-metric-every=-1",
             "--sample-every=-1", "--save-every=-1", f"--model-tag={job.name}", *rates],
            log, self.environment(base), self.folder,
        )  # fmt: skip
        speeds = [float(found.replace(",", "")) for found in re.findall(r"tok/sec: ([\d,]+)", log.read_text(errors="replace"))]
        return {"seconds": seconds, "tokens_per_second": statistics.median(speeds), "model": str(base), "tag": job.name}


def ours(run: Path, out: Path, job: Job) -> dict[str, Any]:
    """Train the quickstart's model, or a dense one, at a size."""
    width, depth = WIDTHS[job.size]
    own = out / "ours" / job.name
    if not (own / "shards").exists():
        own.mkdir(parents=True, exist_ok=True)
        call(["cp", "-rl", *(run / part for part in ("corpus", "tokenizer", "shards")), own], own / "log")
        call(["cp", *(run / part for part in ("origins.json", "resolved.json", "recipe.yaml", "ledger.jsonl")), own], own / "log")
    anneal = round(_ANNEAL * job.tokens / BATCH) * BATCH
    sets = {
        "run_dir": own, "time": "null", "threads": 1, "seed": job.seed, "train.phases.general.tokens": job.tokens // BATCH * BATCH - anneal,
        "train.phases.anneal.tokens": anneal, "model.hidden_size": width, "model.num_hidden_layers": depth,
        "model.num_attention_heads": width // 64, "model.num_key_value_heads": width // 64, "model.intermediate_size": width * 11 // 4,
        "optimizer.learning_rate": RATE * job.rate, "optimizer.adam_learning_rate": RATE * job.rate,
    } | ({"model.moe": "null"} if job.side == "lmworks-dense" else {"model.moe.moe_intermediate_size": width})  # fmt: skip
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "lmworks.cli.main", "run", "quickstart", "--to", "pretrain", *words]
    seconds = call(command, own / "log", {"OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    return {"seconds": seconds, "tokens_per_second": statistics.median(line["perf/tokens_per_second"] for line in lines if
            "perf/tokens_per_second" in line), "model": str(own)}  # fmt: skip


def texts_of(run: Path, others: Mapping[str, Path]) -> dict[str, list[str]]:
    """Texts by name: the held-out documents of the corpus, and other files whole."""
    from lmworks.evaluate.bits_per_byte import held_out

    own = [text for texts in held_out(run / "corpus").values() for text in texts]
    return {"corpus": own} | {name: [path.read_text(encoding="utf-8")] for name, path in others.items()}


def score(job: Job, trained: Mapping[str, Any], texts: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Bits per byte of each text, in fp32, in this process."""
    import torch

    torch.set_num_threads(1)
    if job.without:
        leave_out(job.without.split(","))
    logits, encode, free = _nanochat_model(trained) if job.side.startswith("nanochat") else _own_model(trained)
    return {name: _bits(logits, [encode(one) for one in whole], free) / sum(len(one.encode()) for one in whole)
            for name, whole in texts.items()}  # fmt: skip


def _own_model(trained: Mapping[str, Any]) -> Any:
    import torch

    from lmworks import load_model

    model = load_model(f"{trained['model']}@base")
    module = model.module.float()

    def logits(rows: Any) -> Any:
        with torch.no_grad():
            return module.logits(module.hidden(rows)[0]).float()

    return logits, model.encode, math.log2(VOCABULARY)


def _nanochat_model(trained: Mapping[str, Any]) -> Any:
    import torch
    from nanochat.checkpoint_manager import build_model, find_last_step  # type: ignore[import-not-found]

    place = Path(trained["model"]) / "base_checkpoints" / trained["tag"]
    model, tokenizer, _ = build_model(str(place), find_last_step(str(place)), torch.device("cpu"), "eval")
    bos = tokenizer.get_bos_token_id()

    def logits(rows: Any) -> Any:
        with torch.no_grad():
            return model(rows).float()

    return logits, lambda text: [bos, *tokenizer.encode(text)], 0.0


def _bits(logits: Any, documents: Sequence[Sequence[int]], first: float) -> float:
    """Bits of all tokens but the first of each document, which cost `first`."""
    import torch

    from lmworks.evaluate.bits_per_byte import windows

    total = first * len(documents)
    requests = [request for ids in documents for request in windows(ids, LENGTH)]
    requests.sort(key=lambda one: len(one[0]) + len(one[1]))
    for start in range(0, len(requests), 32):
        some = requests[start : start + 32]
        longest = max(len(before) + len(after) for before, after in some)
        rows = torch.tensor([[*before, *after, *(0,) * (longest - len(before) - len(after))] for before, after in some])
        logprobs = logits(rows[:, :-1]).log_softmax(-1).gather(2, rows[:, 1:, None])[..., 0]
        for row, (before, after) in zip(logprobs, some, strict=True):
            total -= float(row[len(before) - 1 : len(before) - 1 + len(after)].double().sum()) / math.log(2)
    return total


def table(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of each side, size and number of tokens the rate that is best on the corpus: mean over seeds, and half of the range."""
    names = [*lines[0]["bits"]] if lines else []
    yield f"| side | size | tokens | batch | rate | seeds | seconds | tokens/s | {' | '.join(names)} |"
    yield "|---|---|---|---|---|---|---|---|" + "---|" * len(names)
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["size"], line["tokens"], line["side"], line["batch"], line["rate"]), []).append(line)
    for (size, tokens, side, batch, rate), ones in sorted(groups.items()):
        cells = []
        for name in names:
            values = [one["bits"][name] for one in ones]
            cells.append(f"{statistics.mean(values):.3f}" + (f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""))
        seconds, speed = (statistics.median(one[key] for one in ones) for key in ("seconds", "tokens_per_second"))
        about = f"{side} | {size} | {tokens:,} | {batch:,} | x{rate:g} | {len(ones)} | {seconds:,.0f} | {speed:,.0f}"
        yield f"| {about} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nanochat", type=Path, help="a checkout; without it only ours is trained")
    parser.add_argument("--packages", type=Path, default=Path(), help="folder of the packages that it needs besides ours")
    parser.add_argument("--without", nargs="*", default=[], metavar="PARTS", help=f"some of {', '.join(PARTS)}, separated by commas")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE", help="a text that neither has seen")
    parser.add_argument("--tokens", type=int, default=4_771_840)
    parser.add_argument("--batch", type=int, default=BATCH // 2, help="tokens of nanochat's steps")
    parser.add_argument("--sizes", nargs="+", default=[*WIDTHS], choices=[*WIDTHS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--only", default="", help="a regular expression, in SIDE-SIZE-TOKENS-bBATCH-xRATE-seedN")
    parser.add_argument("--core", type=int, help="bind all processes to this core")
    parser.add_argument("--until", type=float, default=math.inf, help="begin none after this time, in seconds since 1970")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, and run nothing")
    parser.add_argument("--score", metavar="LINE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := {part for parts in options.without for part in parts.split(",")} - {*PARTS}:
        parser.error(f"--without: {', '.join(sorted(unknown))} is no part; these are: {', '.join(PARTS)}")
    others = {name: Path(file) for name, _, file in (one.partition("=") for one in options.text)}
    if options.score:
        line = json.loads(options.score)
        print(json.dumps(score(Job(**line["job"]), line["trained"], texts_of(base_of(options.out, Job(**line["job"]).seed), others))))
        return
    results = options.out / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if not options.table:
        if options.core is not None:
            os.sched_setaffinity(0, {options.core})
        done = {line["name"] for line in lines}
        nanochat = Nanochat(options.nanochat, options.packages, options.out) if options.nanochat else None
        sides = {side: rates for side, rates in RATES.items() if side != "nanochat" or nanochat}
        sides |= {f"nanochat-without-{parts}": RATES["nanochat"][:1] for parts in options.without if nanochat}
        batches = {side: options.batch if side.startswith("nanochat") else BATCH for side in sides}
        jobs = [Job(side, size, options.tokens, rate, seed, batches[side]) for size in options.sizes for seed in options.seeds
                for side, rates in sides.items() for rate in rates]  # fmt: skip
        for job in (job for job in jobs if job.name not in done and re.search(options.only, job.name)):
            if time.time() > options.until:
                break
            theirs = nanochat if job.side.startswith("nanochat") else None
            run = corpus(options.out, job.seed)
            trained = theirs.train(run, job) if theirs else ours(run, options.out, job)
            env = theirs.environment(Path(trained["model"])) if theirs else {}
            words = [word for one in options.text for word in ("--text", one)]
            asked = json.dumps({"job": asdict(job), "trained": trained})
            found = subprocess.run([sys.executable, __file__, str(options.out), *words, "--score", asked], env={**os.environ, **env},
                                   stdout=subprocess.PIPE, check=True, encoding="utf-8")  # fmt: skip
            lines.append({"name": job.name, **asdict(job), **trained, "bits": json.loads(found.stdout.splitlines()[-1])})
            with open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(lines[-1]["name"], lines[-1]["bits"], flush=True)
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
