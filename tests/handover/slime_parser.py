"""Stands where slime's train.py and its converter are: slime's and Megatron's own parsers and checks read the command line, and no more.

SGLang needs a GPU's libraries: here it has only the options that slime's checks look at. What was understood goes to the folder ANSWERS;
for train.py also the prompts as slime's data set has them, and what its rewards say of a right answer and of a wrong one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import types
from pathlib import Path

import torch


class Options:
    """Of SGLang's server, without a part in what a hand-over writes."""

    @staticmethod
    def add_cli_args(parser, **_):  # type: ignore[no-untyped-def]
        if not any("--sglang-server-concurrency" in action.option_strings for action in parser._actions):
            return  # the router's
        for name in ("tp-size", "dp-size", "pp-size", "ep-size", "moe-dp-size"):
            parser.add_argument(f"--{name}", type=int, default=1)


def stand_in(name: str, **parts: object) -> None:
    module = types.ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    module.__dict__.update(parts)
    sys.modules[name] = module


for package in ("sglang", "sglang.srt", "sglang_router"):
    stand_in(package)
stand_in("megatron.core.transformer.custom_layers.batch_invariant_kernels", __getattr__=lambda name: None)  # they import Triton
stand_in("sglang.srt.server_args", ServerArgs=Options)
stand_in("sglang_router.launch_router", RouterArgs=Options)
torch.cuda.get_device_capability = lambda *_: (9, 0)  # Megatron asks what the GPU can do where a model has experts: an H100
sys.path[:0] = [os.environ["SLIME_SOURCE"], os.environ["PYTHONPATH"]]

def rewards(args, sample):  # type: ignore[no-untyped-def]
    """Of the right answer in the form that the reward asks for, and of another."""
    from slime.rollout.rm_hub import async_rm

    kind = sample.metadata["rm_type"]
    boxed = "It is \\boxed{{{}}}."
    form = {"dapo": "So:\nAnswer: {}", "f1": "{}", "deepscaler": f"<think>well</think> {boxed}"}.get(kind, boxed)
    found = []
    for answer in (sample.label, "none of these"):
        sample.response = form.format(answer)
        reward = asyncio.run(async_rm(args, sample))
        found.append(float(reward[args.reward_key] if args.reward_key else reward))
    return found


name = Path(sys.argv[0]).name
if name == "train.py":
    from slime.rollout.data_source import RolloutDataSource
    from slime.utils.arguments import parse_args

    args = parse_args()
    data = RolloutDataSource(args).dataset
    more = {"prompts": [sample.prompt for sample in data.samples], "rewards": [rewards(args, sample) for sample in data.samples]}
else:
    place = Path(os.environ["SLIME_SOURCE"], "tools", name)
    specification = importlib.util.spec_from_file_location("converter", place)
    assert specification and specification.loader
    converter = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(converter)
    args, more = converter.get_args(), {}
plain = {key: value for key, value in vars(args).items() if isinstance(value, (bool, int, float, str, list, type(None)))}
Path(os.environ["ANSWERS"], f"{name}.json").write_text(json.dumps({"arguments": plain, **more}), encoding="utf-8")
