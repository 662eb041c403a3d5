"""Writes what slime needs for reinforcement learning of a model on many GPUs, and checks what comes back."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.deploy.source import Source, open_source
from lmworks.errors import UserError
from lmworks.handover.megatron import Argument, copies, mapping, model_arguments, require_bijection
from lmworks.handover.prompts import Prompts, read_prompts
from lmworks.io.destinations import require_empty
from lmworks.io.files import link_or_copy, read_json, rendered, whole_directory, write_json, write_text
from lmworks.io.masking import mask
from lmworks.recipe.weight_files import left_aside
from lmworks.tokenizer import load
from lmworks.train.data.decontamination import Decontamination
from lmworks.weights.huggingface import files_of
from lmworks.weights.verified import REPORT, verify_export

_DAPO_KEY = "score"
_PROMPTS_A_ROLLOUT, _SAMPLES, _STEPS_A_ROLLOUT = 128, 8, 4
_WEIGHTS = (".safetensors", ".index.json")


@dataclass(frozen=True)
class Handover:
    """What was decided and checked. `tensors`: pairs of names in both directions; `mtp`: layers of multi-token prediction;
    `contaminated`: rows that held an item of the evaluation, None if no search was made."""

    arguments: list[Argument]
    run_arguments: dict[str, list[Argument]]
    tensors: int
    mtp: int
    prompts: int
    longest: int
    contaminated: int | None

    @property
    def every_argument(self) -> list[Argument]:
        return [*self.arguments, *(one for group in self.run_arguments.values() for one in group)]


def hand_over(
    model: Path, prompts: list[Path], out: Path, *, rm_type: str = "math", rm_url: str | None = None, max_response: int | None = None,
    epochs: int = 1, decontamination: Decontamination | None = None,
) -> Handover:  # fmt: skip
    """Write the Hugging Face directory, model_args.sh, prompts.jsonl, run.sh, names.json and README.md to `out`, new or empty.

    `rm_url` is the service of the reward `remote_rm`. `max_response` is in tokens; by default half of the context, and prompts have the
    rest. `epochs` is how often each prompt is asked. `decontamination` decides about prompts that hold an item of the evaluation. Raises
    `UserError`, also for damaged files, and leaves nothing.
    """
    out = Path(out)
    require_empty(out)
    _require_address(rm_url)
    source = open_source(model)
    if source.quantization:
        raise UserError(f"{source.name} is quantized; hand over the model before that")
    verify_export(source.directory)
    described = _with_mtp(source)
    arguments = model_arguments(described, source.family)
    tensors = require_bijection(shapes(source.directory), described)
    response = max_response or source.context // 2
    if not 0 < response < source.context:
        raise UserError(f"--max-response {response} leaves no room for a prompt in a context of {source.context} tokens")
    rows = read_prompts(prompts, load(source.directory), rm_type, source.context - response, decontamination)
    run = run_arguments(source, rows, rm_type, response, rm_url, epochs)
    made = Handover(arguments, run, tensors, source.mtp, len(rows.rows), rows.longest, rows.contaminated)
    with whole_directory(out) as aside:
        _write(made, source, rows, aside)
    return made


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, from the headers of the files."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[int, ...]] = {}
    with ExitStack() as stack:
        for file in files_of(directory):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                raise UserError(f"{file} is damaged ({error}); export it again") from None
            found |= {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    return found


def _with_mtp(source: Source) -> Any:
    """The model without layers of multi-token prediction that the config states and whose weights are missing."""
    return source.model if source.mtp else source.model.model_copy(update={"mtp": None})


def run_arguments(
    source: Source, rows: Prompts, rm_type: str, response: int, rm_url: str | None = None, epochs: int = 1
) -> dict[str, list[Argument]]:
    """Arguments of slime's train.py by group, each with its reason. Raises `UserError` for rewards that do not go together."""
    batch = min(_PROMPTS_A_ROLLOUT, len(rows.rows))
    rollouts = math.ceil(epochs * len(rows.rows) / batch)
    generation = source.directory / "generation_config.json"
    stops = read_json(generation).get("eos_token_id", []) if generation.is_file() else []
    stops = [stops] if isinstance(stops, int) else list(stops)
    rollout = [
        Argument("--prompt-data", "$here/prompts.jsonl", "checked rows"),
        Argument("--input-key", "prompt", "a list of messages"),
        Argument("--label-key", "label", "the right answer, as text"),
        Argument("--metadata-key", "metadata", "rm_type of each row"),
        Argument("--apply-chat-template", None, "the model's own template renders the messages"),
        *_reward_arguments(rm_type, {row["metadata"]["rm_type"] for row in rows.rows}, rm_url),
        Argument("--num-rollout", str(rollouts),
                 f"rollouts in which every prompt is asked {epochs} x at least: slime's --num-epoch rounds down, and leaves prompts out"),
        Argument("--rollout-max-prompt-len", str(source.context - response), "slime drops longer prompts in silence; no row is longer"),
        Argument("--rollout-max-response-len", str(response), "with the prompt at most the context of the model"),
        Argument("--rollout-batch-size", str(batch), "prompts of a rollout"),
        Argument("--n-samples-per-prompt", str(_SAMPLES), "answers per prompt, which are compared with each other"),
        Argument("--num-steps-per-rollout", str(_STEPS_A_ROLLOUT if batch == _PROMPTS_A_ROLLOUT else 1),
                 "optimizer steps of a rollout, each on a part of its answers; one where there are few"),
        Argument("--rollout-temperature", "1", "samples of the policy itself: filters would be missing in the scores"),
        Argument("--rollout-shuffle", None, "another order in each epoch"),
    ]  # fmt: skip
    if stops:
        rollout.append(
            Argument("--rollout-stop-token-ids", " ".join(map(str, stops)), "every token that ends an answer, in order of the export")
        )
    name, low, high, why = (
        ("gspo", "1e-4", "2e-4", "ratios of whole answers: with experts, ratios of single tokens jump when a router changes its mind")
        if source.model.moe is not None
        else ("grpo", "0.2", "0.28",
              "advantages within the answers to one prompt; the upper limit is wider, so that rare tokens can rise (DAPO)")
    )
    policy = [
        Argument("--advantage-estimator", name, why),
        Argument("--eps-clip", low, "lower limit of the ratio"),
        Argument("--eps-clip-high", high, "upper limit of the ratio"),
        Argument("--use-tis", None, "truncated importance sampling corrects the difference between SGLang's and Megatron's probabilities"),
        Argument("--entropy-coef", "0", "no reward for randomness"),
    ]
    optimizer = [
        Argument("--optimizer", "adam", "as in slime's scripts"),
        Argument("--lr", "1e-6", "small, because the policy that samples is the one that is trained"),
        Argument("--lr-decay-style", "constant", "the length of the run need not be known"),
        Argument("--weight-decay", "0.1", "as in slime's scripts"),
        Argument("--adam-beta1", "0.9", "as in slime's scripts"),
        Argument("--adam-beta2", "0.98", "as in slime's scripts"),
    ]
    return {"ROLLOUT_ARGS": rollout, "POLICY_ARGS": policy, "OPTIMIZER_ARGS": optimizer}


def _require_address(url: str | None) -> None:
    if url is None:
        return
    if mask(url) != url:
        raise UserError("--rm-url has credentials, which run.sh and every list of processes would show; name a service without any")
    if not re.fullmatch(r"https?://[^\s/?#]+\S*", url):
        raise UserError(f"--rm-url {url!r} is no address of a service; write http://HOST:PORT/PATH")


def _reward_arguments(rm_type: str, kinds: set[str], url: str | None) -> list[Argument]:
    """`kinds` are the rewards of the rows."""
    found = [Argument("--rm-type", rm_type, "how answers are scored where a row does not say otherwise")]
    if "dapo" in kinds:  # its reward is {"score": ..., "acc": ..., "pred": ...}, those of the others are numbers
        if others := kinds - {"dapo"}:
            raise UserError(f"the rewards dapo and {min(others)} cannot be mixed: slime reads {_DAPO_KEY!r} of all rewards or of none")
        found.append(Argument("--reward-key", _DAPO_KEY, "the reward dapo is an object, and this its number"))
    if ("remote_rm" in kinds) != (url is not None):
        if url is None:
            raise UserError("the reward remote_rm asks a service: say where it is with --rm-url URL")
        raise UserError("--rm-url is the service of the reward remote_rm, which no row has; add --rm-type remote_rm, or leave it out")
    if url is not None:
        found.append(Argument("--rm-url", url, "the service of remote_rm: it gets prompt, response and label, and returns a number"))
    return found


def _write(made: Handover, source: Source, rows: Prompts, out: Path) -> None:
    target = out / "huggingface"
    _place_model(source.directory, target)
    verify_export(target)  # the copy
    if not source.mtp and source.model.mtp is not None:  # engines fail on a config that states layers without weights
        (target / REPORT).unlink(missing_ok=True)  # of the config before that
        (target / "config.json").unlink()
        write_json(target / "config.json", read_json(source.directory / "config.json") | {"num_nextn_predict_layers": 0})
    write_text(out / "prompts.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.rows))
    write_text(out / "model_args.sh", _array("MODEL_ARGS", made.arguments, "Arguments of slime's Megatron for this model."))
    groups = "\n".join(_array(name, arguments) for name, arguments in made.run_arguments.items())
    write_text(out / "run.sh", rendered("lmworks.handover", "run.sh.jinja", arguments=groups))
    (out / "run.sh").chmod(0o755)
    model = _with_mtp(source)
    names = {one.megatron: {"huggingface": list(one.huggingface), "kind": one.kind} for one in mapping(model)}
    write_json(out / "names.json", {"tensors": names, "copies": copies(model)})
    write_text(out / "README.md", rendered("lmworks.handover", "README.md.jinja", made=made))


def _place_model(directory: Path, target: Path) -> None:
    """Put the files of a model into a new folder, without weights that are not its own: a framework reads all that it finds."""
    target.mkdir()
    others = left_aside(directory)
    for file in sorted(directory.iterdir()):
        if file.is_file() and file.name not in others:
            # weights may be hundreds of gigabytes; other files may be edited
            place = link_or_copy if file.suffix == ".safetensors" and not file.is_symlink() else shutil.copyfile
            place(file, target / file.name)


def _array(name: str, arguments: list[Argument], head: str = "") -> str:
    lines = [f"# {head}"] if head else []
    lines.append(f"{name}=(")
    for one in arguments:
        lines.append(f"  # {one.reason}")
        if one.value is None:
            lines.append(f"  {one.name}")
        elif one.value.startswith("$here/"):
            lines.append(f'  {one.name} "{one.value}"')
        elif one.name == "--rollout-stop-token-ids":
            lines.append(f"  {one.name} {one.value}")
        else:
            lines.append(f"  {one.name} {shlex.quote(one.value)}")
    return "\n".join([*lines, ")"]) + "\n"


def check_back(model: Path, back: Path) -> dict[str, Any]:
    """Check a directory that slime's converter wrote from a trained model: the same tensors with the same shapes as `model`.

    Returns the numbers of tensors and of those that have changed. Raises `UserError` if something is missing, as multi-token prediction was
    in some versions of the converter, or has another shape.
    """
    import torch
    from safetensors import safe_open

    before, after = open_source(model), open_source(back)
    given, found = shapes(before.directory), shapes(after.directory)
    own = copies(before.model)
    missing = sorted(given.keys() - found.keys() - own.keys())
    layers = before.model.num_hidden_layers or 0
    lost = [name for name in missing if name.startswith("model.layers.") and int(name.split(".")[2]) >= layers]
    if lost and lost == missing:
        raise UserError(
            f"{back} has lost multi-token prediction ({len(lost)} tensors, such as {lost[0]}); convert again with --origin-hf-dir MODEL "
            "and --mtp-num-layers in MODEL_ARGS"
        )
    for what, names in (("lacks", missing), ("has in addition", sorted(found.keys() - given.keys()))):
        if names:
            raise UserError(f"{back} {what} {names[0]} ({len(names)} tensors); it is not this model")
    for name, shape in found.items():
        if shape != given[name]:
            raise UserError(
                f"{back}: {name} has shape {shape}, but the model has {given[name]}; was the padding of the vocabulary removed?"
            )
    changed = 0
    with ExitStack() as stack:

        def opened(directory: Path) -> dict[str, Any]:
            handles = [stack.enter_context(safe_open(file, framework="pt")) for file in files_of(directory)]
            return {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118

        old, new = opened(before.directory), opened(after.directory)
        for name in found:
            value = new[name].get_tensor(name)
            if not bool(torch.isfinite(value.float()).all()):
                raise UserError(f"{back}: {name} has values that are not finite; the training has failed")
            changed += not torch.equal(value.float(), old[name].get_tensor(name).float())
    return {"tensors": len(found), "changed": changed, "mtp": after.mtp}
