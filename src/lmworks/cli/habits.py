"""Words that people type by habit from other tools, and the command line that does the same here."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from typing import Any

WORDS = {
    "run": "train fit launch-train resume continue restart start-run",
    "pretrain": "pretraining cpt",
    "tune": "finetune fine-tune finetuning ft sft instruct lora qlora",
    "dpo": "kto ipo simpo orpo preference prefer align",
    "grpo": "rl rlhf ppo rloo rlvr reinforce gspo dapo",
    "evaluate": "eval evals evaluation benchmark bench benchmarks lm-eval score test",
    "chat": "generate generation infer inference predict complete sample ask talk prompt cli",
    "serve": "server api deploy-local webui",
    "export": "merge merge-lora convert convert-to-hf to-hf hf gguf to-gguf push save",
    "quantize": "quantise quant compress awq gptq",
    "corpus prepare": "preprocess prepare preprocess-data prepare-data process-data dedup filter clean",
    "shards build": "tokenize tokenise encode build-data pack binarize",
    "tokenizer train": "train-tokenizer tok-train vocab bpe",
    "report": "status info monitor watch logs dashboard tensorboard plot metrics page",
    "ckpt list": "checkpoints checkpoint list-checkpoints ls list",
    "show": "config print-config validate check-config dump inspect cfg",
    "plan": "estimate memory cost size calc dry-run flops calculator",
    "preflight": "gpus devices hardware env nvidia-smi check test-env",
    "profile": "profiler trace prof flamegraph nsys bottleneck oom",
    "init": "new create setup configure wizard quickstart template scaffold",
    "ablate": "sweep search grid hyperparameter tune-hyperparameters hpo",
    "ladder run": "scaling scaling-laws scaling-law",
    "launch local": "torchrun accelerate distributed multi-gpu ddp fsdp deepspeed",
    "launch slurm": "sbatch srun slurm submit",
    "copy": "upload sync backup push-to-hub",
    "restore": "download pull fetch",
    "launch job": "jobs squeue",
    "--help": "help commands usage h man",
    "--version": "version v ver",
}
"""A command: the words for which it is the answer."""
_COMMAND_OF = {word: command for command, words in WORDS.items() for word in words.split()}

POSITIONAL = {"--recipe", "--config", "-c", "--config-file", "--config-name", "--config-path", "--cfg", "--yaml", "--job.config-file"}
"""Options whose value is the recipe, which is an argument here."""
KEYS = {
    "run_dir": "out-dir run-dir save-dir save output", "start_from": "model model-path pretrained",
    "optimizer.learning_rate": "lr learning-rate", "train.precision": "dtype precision mixed-precision", "seed": "random-seed seed",
    "tune.epochs": "epochs num-epochs num-train-epochs n-epochs", "threads": "num-threads threads workers",
}  # fmt: skip
"""A key of the recipe: the options that mean it, without their dashes. Others are looked up among the keys of other tools
(`recipe/names.py`), some of which mean one of several keys, or another unit."""
_KEY_OF = {f"--{word}": key for key, words in KEYS.items() for word in words.split()}
NEEDLESS = {
    "--resume": "a run resumes by itself", "--continue": "a run resumes by itself",
    "--verbose": "--debug shows the traceback of an error", "-v": "--debug shows the traceback of an error",
}  # fmt: skip
RANKS = {"--gpus", "--num-gpus", "--n-gpus", "--ngpus", "--nproc-per-node", "--num-processes", "--nproc", "--world-size", "-np"}
"""Options with a number of processes."""
_MODEL = {"--model", "--model-path", "--model-name-or-path", "--checkpoint", "--ckpt", "--run", "-m"}
"""Options whose value is the argument of commands that read a model."""
_OWN_SECTION = (["tune"], ["dpo"], ["grpo"])
"""Commands that run a stage with a section of its own in the recipe."""
_READERS = (["evaluate"], ["chat"], ["serve"], ["quantize"], ["report"], ["speed"], ["deploy", "write"])
_NEAR = 0.75  # similarity of a mistyped word
_ASSIGNED = re.compile(r"(?:\+\+|\+|--)?([a-z_]+(?:\.[\w-]+)*)=(.*)", re.DOTALL)


def answer(arguments: Sequence[str], group: Any) -> str | None:
    """The line that answers arguments which `group`, the tree of commands, cannot parse: what is meant, and the command that does it. None
    if nothing of them is known."""
    words, said = list(arguments), list[str]()
    if words and not words[0].startswith("-") and words[0] not in group.commands:
        word = words[0].lower().replace("_", "-")
        meant = _COMMAND_OF.get(word) or next(iter(difflib.get_close_matches(word, [*group.commands, *_COMMAND_OF], 1, _NEAR)), None)
        if meant is None:
            return None
        meant = _COMMAND_OF.get(meant, meant)
        said.append(f"there is no command {words[0][:100]!r}")
        if meant == "--help" and len(words) > 1 and words[1] in group.commands:
            return f"{said[0]}; write: lmworks {words[1]} --help"
        first, *below = meant.split()
        if words[1:] and words[1] in getattr(group.commands.get(first), "commands", {}):
            below = []  # the word stands for the group, and its command follows
        words = [first] if meant.startswith("--") else [first, *below, *words[1:]]
    place, command = 0, group
    while place < len(words) and words[place] in getattr(command, "commands", {}):
        command = command.commands[words[place]]
        place += 1
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    path, ranks = words[:place], ""
    rest, whole = _options(words[place:], known, path, said)
    if rest and rest[0].startswith("\0"):
        ranks, rest = rest[0][1:], rest[1:]
        path, rest = (["launch", "local"], [*rest, "--ranks", ranks]) if path != ["plan"] else (path, [*rest, "--cluster", ranks])
    written = f"; write: {shlex.join(['lmworks', *path, *rest])}" if whole else ""
    return f"{'; '.join(said)}{written}" if said else None


def _of_stage(key: str | None, path: list[str]) -> str | None:
    """The key in the section of the stage that a command runs, where that has one of this name; None where only another stage has."""
    from lmworks.recipe.keys import known_paths
    from lmworks.recipe.schema.recipe import Recipe

    if key is None or path not in _OWN_SECTION:
        return key
    own = f"{path[0]}.{key.rpartition('.')[2]}"
    if own in known_paths(Recipe):
        return own
    return None if key.partition(".")[0] == "tune" else key


def _options(words: list[str], known: set[str], path: list[str], said: list[str]) -> tuple[list[str], bool]:
    """The words behind a command with its own options in place of habitual ones, each of which is named in `said`; and whether all are
    there: one that stands for several keys, or for one in another unit, is left to the user. A number of processes comes first, behind a
    zero byte."""
    from lmworks.recipe.keys import advice, of_another_tool
    from lmworks.recipe.schema.recipe import Recipe

    recipe, ranks, kept, waiting, whole = list[str](), list[str](), list[str](), list(words), True
    takes_keys, where = "--set" in known, path[0] if path in _OWN_SECTION else ""
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        plain = name.replace("_", "-").lower() if name.startswith("-") else name
        assigned = _ASSIGNED.fullmatch(word)
        key = _of_stage(_KEY_OF.get(plain), path)
        if key is None and name.startswith("--") and name[2:].partition(".")[0] in Recipe.model_fields:
            key = name[2:]
        if name in known:
            kept.append(word)
            if not equals and name in ("--set", "--allow") and waiting:
                kept.append(waiting.pop(0))
        elif plain in NEEDLESS:
            said.append(f"{name} is not needed: {NEEDLESS[plain]}")
        elif (plain in POSITIONAL or (plain in _MODEL and path in _READERS)) and (equals or waiting):
            recipe.append(value if equals else waiting.pop(0))
            said.append(f"{name} is the argument itself")
        elif plain in RANKS and (equals or waiting) and path in (["run"], ["pretrain"], ["plan"], ["tune"], ["dpo"], ["grpo"]):
            ranks.append("\0" + (value if equals else waiting.pop(0)))
            said.append(f"{name} is {'--cluster' if path == ['plan'] else '--ranks of lmworks launch'}")
        elif takes_keys and key is not None and (equals or waiting):
            kept += ["--set", f"{key}={value if equals else waiting.pop(0)}"]
            said.append(f"{name} is a key of the recipe")
        elif takes_keys and assigned and assigned[1].partition(".")[0] in Recipe.model_fields:
            kept += ["--set", f"{assigned[1]}={assigned[2]}"]
            said.append("values of the recipe are given by --set")
        elif takes_keys and name.startswith("--") and any(found := of_another_tool(where, name[2:])):
            follows = bool(waiting) and not waiting[0].startswith("-") and not waiting[0].endswith((".yaml", ".yml"))
            given = value if equals else waiting.pop(0) if follows else ""
            named, notes = found
            said.append(f"{name} is not an option: {advice(named, notes)}")
            if given and len(named) == 1 and not notes:
                kept += ["--set", f"{named[0]}={given}"]
            elif named:
                whole = False
        else:
            kept.append(word)
    said[:] = dict.fromkeys(said)
    return [*ranks[:1], *recipe, *kept], whole
