"""Is what the device computes right? Versions, first steps, waits, and the device against the CPU."""

from __future__ import annotations

import importlib.util
import math
import platform
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
import torch._dynamo
from gpu.models import DENSE_30M, MOE, TINY, TINY_MOE, batch_of, build, error, fresh_memory, recipe_of, step, the_device, wait
from gpu.resumed import resumed
from gpu.runner import Row

from lmworks.host import machine
from lmworks.host.devices import has_bf16
from lmworks.metrics.system import memory_bytes
from lmworks.model import moe
from lmworks.model.router import Routing
from lmworks.optim.groups import local

_PACKAGES = ("torch", "triton", "numpy", "pydantic", "pydantic_core", "blake3", "ftfy", "tokenizers", "safetensors", "pyarrow", "regex",
             "transformers", "nvidia-ml-py")  # fmt: skip
_APIS = ("torch.nn.functional:grouped_mm", "torch:_scaled_mm", "torch:_scaled_grouped_mm", "torch.nn.attention.flex_attention:BlockMask",
         "torch.nn.attention.varlen:varlen_attn", "torch.cuda:set_sync_debug_mode", "torch.distributed.fsdp:fully_shard",
         "torch.distributed.pipelining:PipelineStage", "torch.distributed:ProcessGroupNCCL")  # fmt: skip
_ROOMS = ("cli.main", "train.pretrain", "train.grpo", "train.dpo", "serve.engine", "evaluate.evaluate", "weights.huggingface",
          "export.export", "corpus.pipeline")  # fmt: skip


def versions(toy: bool) -> Iterator[Row]:
    """What is here: packages, interfaces of torch that are used, the card, and which rooms of lmworks can be imported."""
    yield {"python": platform.python_version(), "machine": platform.machine(), "cores": machine.cores(), "memory": machine.memory()}
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    yield {"packages": found}
    yield {"apis": {name: _has(name) for name in _APIS}}
    yield {"imports": {name: _import(f"lmworks.{name}") for name in _ROOMS}}
    if not torch.cuda.is_available():
        yield {"device": "cpu", "bf16_products": has_bf16(torch.device("cpu"))}
        return
    about = torch.cuda.get_device_properties(0)
    yield {"device": about.name, "memory": about.total_memory, "capability": torch.cuda.get_device_capability(0),
           "processors": about.multi_processor_count, "cuda": torch.version.cuda, "nccl": torch.cuda.nccl.version(),
           "count": torch.cuda.device_count()}  # fmt: skip
    if importlib.util.find_spec("pynvml"):
        import pynvml

        pynvml.nvmlInit()
        limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1000
        yield {"driver": pynvml.nvmlSystemGetDriverVersion(), "power_limit_watts": limit}


def _has(name: str) -> bool:
    module, _, attribute = name.partition(":")
    try:
        return hasattr(import_module(module), attribute)
    except Exception:
        return False


def _import(name: str) -> str:
    try:
        import_module(name)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"[:200]
    return "imported"


def first_steps(toy: bool) -> Iterator[Row]:
    """Twenty compiled steps on one batch, dense and sparse: finite, falling, without compiling again."""
    device = the_device()
    length, rows = (64, 2) if toy else (2048, 8)
    for name, model_keys in (("dense", TINY if toy else DENSE_30M), ("moe", TINY_MOE if toy else MOE)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        fresh_memory(device)
        recipe = recipe_of(model_keys, length, rows, "train.compile=true")
        began = time.perf_counter()
        model, optimizer = build(recipe, device)
        wait(device)
        yield {"model": name, "parameters": sum(one.numel() for one in model.parameters()), "build_seconds": time.perf_counter() - began}
        batch = batch_of(recipe, rows, length, documents=3)
        losses, graphs, times = [], [], []
        for _ in range(20):
            began = time.perf_counter()
            losses.append(step(model, optimizer, batch, rows).loss)
            wait(device)
            times.append(time.perf_counter() - began)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        values = [float(loss) for loss in losses]
        sound = all(map(math.isfinite, values)) and values[-1] < values[0] - 0.1
        yield {
            "model": name, "precision": str(model.compute_dtype), "losses": values, "first_step_seconds": times[0],
            "tokens_per_second": rows * length / sorted(times)[10], "graphs": graphs[-1], "compiled_again": graphs[-1] - graphs[1],
            "graph_breaks": dict(torch._dynamo.utils.counters["graph_break"]), "memory": memory_bytes(), "sound": sound,
        }  # fmt: skip
        if not sound:
            raise AssertionError(f"{name}: the loss goes from {values[0]} to {values[-1]}")


def host_waits(toy: bool) -> Iterator[Row]:
    """Where a training step makes the host wait, by line, as CUDA reports it. Nothing is reported without a GPU."""
    device = the_device()
    length, rows = (64, 2) if toy else (2048, 4)
    for name, model_keys in (("dense", TINY if toy else DENSE_30M), ("moe", TINY_MOE if toy else MOE)):
        recipe = recipe_of(model_keys, length, rows)
        model, optimizer = build(recipe, device)
        batch = batch_of(recipe, rows, length, documents=3)
        step(model, optimizer, batch, rows)
        wait(device)
        with Waits(device) as waits:
            step(model, optimizer, batch, rows)
        wait(device)
        yield {"model": name, "waits": dict(waits.found)}


class Waits:
    """Counts, by line of lmworks, the calls within its block that make the host wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self.found = device.type == "cuda", Counter[str]()

    def __enter__(self) -> Waits:
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._count  # type: ignore[assignment]
        if self._cuda:
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(None, None, None)

    def _count(self, message: Warning, *_: object, **__: object) -> None:
        if "synchroniz" not in str(message):
            return
        frames = [one for one in traceback.extract_stack() if "/lmworks/" in one.filename]
        place = f"{frames[-1].filename.rpartition('/lmworks/')[2]}:{frames[-1].lineno}" if frames else "a backward pass"
        self.found[place] += 1


def against_cpu(toy: bool) -> Iterator[Row]:
    """The same model on the CPU and on the device: loss, gradients, and ten steps, in fp32 and in bf16."""
    device, cpu = the_device(), torch.device("cpu")
    length, rows = (64, 2) if toy else (256, 4)
    for name, model_keys in (("dense", TINY), ("moe", TINY_MOE)):
        for precision, most in (("fp32", 1e-4), ("bf16", 0.05)):
            recipe = recipe_of(model_keys, length, rows, f"train.precision={precision}", "train.compile=false")
            batch = batch_of(recipe, rows, length, documents=3)
            losses, gradients = [], []
            for place in (cpu, device):
                model, optimizer = build(recipe, place)
                sums = model.forward_backward(batch, rows, rows, 1.0 / batch.valid_tokens)
                gradients.append({key: local(one.grad).detach().cpu() for key, one in model.named_parameters() if one.grad is not None})
                first = float(sums.cross_entropy) / batch.valid_tokens
                losses.append([first, *(float(step(model, optimizer, batch, rows).loss) for _ in range(10))])
            apart = {key: error(gradients[1][key], gradients[0][key]) for key in gradients[0]}
            worst = max(apart, key=apart.__getitem__)
            far = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
            sound = apart[worst] < most and abs(losses[0][0] - losses[1][0]) < most * losses[0][0]
            yield {"model": name, "precision": precision, "loss": [losses[0][0], losses[1][0]], "worst_gradient": worst,
                   "relative_error": apart[worst], "ten_steps_apart": far, "most": most, "sound": sound}  # fmt: skip
            if not sound:
                raise AssertionError(f"{name} in {precision}: the gradient of {worst} differs by {apart[worst]:.2g}")


def grouped_products(toy: bool) -> Iterator[Row]:
    """Experts by grouped products against one at a time: uneven, with empty experts, and without a row; forward and backward."""
    device = the_device()
    E, D, H, N, K = (8, 64, 32, 128, 2) if toy else (64, 2048, 1024, 8192, 4)
    draw = torch.Generator(device).manual_seed(0)
    weights = [torch.randn(*shape, generator=draw, device=device).mul_(0.05).bfloat16() for shape in ((E, H, D), (E, H, D), (E, D, H))]
    for name, tokens, busy in (("ragged", N, E), ("empty experts", N, 4), ("one token", 1, E), ("no token", 0, E)):
        x_ND = torch.randn(tokens, D, generator=draw, device=device).bfloat16()
        chosen = torch.rand(tokens, busy, generator=draw, device=device).argsort(-1)[:, :K]
        counts = torch.bincount(chosen.reshape(-1), minlength=E)
        routing = Routing(chosen, torch.full((tokens, K), 1.0 / K, device=device), counts, None)
        results = []
        for run in (moe.experts_plain, moe.experts_fast):
            inputs = [one.detach().clone().requires_grad_() for one in (x_ND, *weights)]
            out = run(inputs[0], routing, *inputs[1:])
            out.float().square().sum().backward()
            results.append([out, *(one.grad for one in inputs)])
        apart = [error(b, a) if a.numel() and bool(a.any()) else float(b.float().abs().sum()) for a, b in zip(*results, strict=True)]
        sound = max(apart) < 0.02
        errors = dict(zip(("out", "x", "gate", "up", "down"), apart, strict=True))
        yield {"case": name, "rows": tokens * K, "errors": errors, "sound": sound}
        if not sound:
            raise AssertionError(f"{name}: grouped products differ by {max(apart):.2g}")


def resume(toy: bool) -> Iterator[Row]:
    """A run from text over a process group of one rank, killed after a save and typed again: its losses beside those before."""
    yield from resumed(toy)
