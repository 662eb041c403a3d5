"""How fast is the device? Attention, products, training at the width of an 8B model, decoding."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch
import torch.nn.functional as F
from gpu.models import TINY, WIDTH_8B, batch_of, build, error, fresh_memory, recipe_of, seconds, step, the_device, wait
from gpu.runner import Row
from gpu.soundness import Waits
from torch import Tensor

from lmworks.metrics.system import measure_peak, memory_bytes
from lmworks.model.attention import attend_fast, attend_plain
from lmworks.model.batching import ContinuousBatch
from lmworks.model.documents import from_cu_seqlens
from lmworks.model.sampling import GenerateOptions
from lmworks.plan.flops import flops_per_token
from lmworks.plan.memory import memory
from lmworks.recipe.loading.load import load_cluster
from lmworks.recipe.schema.activation_checkpointing import POLICIES
from lmworks.recipe.schema.layout import Layout

GIB = 2**30
_SIZES = {"attention": (4096, 4096), "key and value": (4096, 1024), "gate, up": (4096, 14336), "down": (14336, 4096),
          "head": (4096, 131072)}  # fmt: skip


def attention(toy: bool) -> Iterator[Row]:
    """Attention as a layer calls it, compiled, and each kernel of SDPA, at three shapes: milliseconds and error against fp32."""
    device = the_device()
    shapes = {  # B, H, K, T, C, documents, window
        "causal": (1, 4, 2, 64, 16, 1, None) if toy else (2, 32, 8, 4096, 128, 1, None),
        "documents": (2, 4, 2, 64, 16, 3, None) if toy else (4, 32, 8, 2048, 128, 6, None),
        "window": (1, 4, 2, 128, 16, 1, 32) if toy else (1, 32, 8, 8192, 128, 1, 1024),
    }
    for name, (B, H, K, T, C, documents, window) in shapes.items():
        draw = torch.Generator(device).manual_seed(0)
        query, key, value = (torch.randn(B, heads, T, C, generator=draw, device=device).bfloat16() for heads in (H, K, K))
        cu_seqlens = torch.from_numpy(batch_of(recipe_of(TINY, T), B, T, documents).cu_seqlens).to(device)
        found = from_cu_seqlens((B, T), cu_seqlens if documents > 1 else None, window, device)
        mask = found.window_mask if window else found.mask
        inputs = [one.requires_grad_() for one in (query, key, value)]
        ours = torch.compile(partial(attend_fast, dropout=0.0), dynamic=False)
        with torch.no_grad():
            first = slice(0, 1)
            small = [one[first, : max(1, one.shape[1] // 8)].float() for one in (query, key, value)]  # one sequence, an eighth of the heads
            part = from_cu_seqlens((1, T), cu_seqlens[: documents + 1] if documents > 1 else None, window, device)
            expected = attend_plain(*small, part.window_mask if window else part.mask, 0.0)
            apart = error(ours(query, key, value, mask)[first, : expected.shape[1]], expected)
        about = {"shape": name, "arm": "lmworks", "error": apart, "blocks": mask is not None and mask.blocks is not None}
        yield about | _times(partial(ours, *inputs, mask), inputs, device)
        if documents == 1 and window is None:
            yield from _sdpa(name, inputs, device)
        if not apart < 0.02:
            raise AssertionError(f"{name}: attention differs from fp32 by {apart:.2g}")


def _sdpa(name: str, inputs: list[Tensor], device: torch.device) -> Iterator[Row]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "default"):
        kinds = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        try:
            with sdpa_kernel(kinds if backend == "default" else getattr(SDPBackend, backend)):
                yield {"shape": name, "arm": f"sdpa {backend}"} | _times(
                    lambda: F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True), inputs, device
                )
        except RuntimeError as refusal:
            yield {"shape": name, "arm": f"sdpa {backend}", "refused": str(refusal)[:150]}


def _times(run, inputs: list[Tensor], device: torch.device) -> Row:  # type: ignore[no-untyped-def]
    with torch.no_grad():
        forward = seconds(run, device, rounds=5)

    def both() -> None:
        torch.autograd.grad(run().sum(), inputs)

    return {"forward_ms": forward * 1e3, "both_ms": seconds(both, device, rounds=5) * 1e3}


def products(toy: bool) -> Iterator[Row]:
    """Matrix products at the shapes of an 8B layer in bf16 and rowwise fp8, and copies, in TFLOP/s and GB/s."""
    device = the_device()
    tokens, sizes = (64, {"square": (64, 64), "up": (64, 128)}) if toy else (16384, _SIZES)
    yield {"peak_tflops": measure_peak() / 1e12}
    for name, (inputs, outputs) in sizes.items():
        rows = 1024 if name == "head" and not toy else tokens  # a chunk of the loss
        x, weight = torch.randn(rows, inputs, device=device).bfloat16(), torch.randn(outputs, inputs, device=device).bfloat16()
        grad = torch.randn(rows, outputs, device=device).bfloat16()
        work = 2.0 * rows * inputs * outputs / 1e12
        arms = {"forward": (x, weight.T), "gradient of x": (grad, weight), "gradient of weight": (grad.T, x),
                "forward, cast from fp32": (x, weight.float().T)}  # fmt: skip
        row: Row = {"product": name, "rows": rows}
        for arm, (left, right) in arms.items():
            row[arm] = work / seconds(partial(_product, left, right), device)
        with suppress(RuntimeError, NotImplementedError, AttributeError):
            row["fp8 rowwise"] = work / seconds(_fp8(x, weight), device)
        yield row
    count = (1 << 16) if toy else (1 << 30)
    source, target = torch.empty(count, dtype=torch.uint8, device=device), torch.empty(count, dtype=torch.uint8, device=device)
    host = torch.empty(count // 4, dtype=torch.uint8)
    speeds = {"device_to_device": 2 * count / seconds(lambda: target.copy_(source), device),
              "pageable_to_device": len(host) / seconds(lambda: source[: len(host)].copy_(host), device, rounds=3)}  # fmt: skip
    if device.type == "cuda":
        pinned = host.pin_memory()
        speeds["pinned_to_device"] = len(host) / seconds(lambda: source[: len(host)].copy_(pinned, non_blocking=True), device, rounds=3)
        speeds["device_to_pinned"] = len(host) / seconds(lambda: pinned.copy_(source[: len(host)], non_blocking=True), device, rounds=3)
    yield {"copies_gb_per_second": {name: speed / 1e9 for name, speed in speeds.items()}}


def _product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right.to(left.dtype)


def _fp8(x: Tensor, weight: Tensor):  # type: ignore[no-untyped-def]
    """A product of e4m3 numbers with a scale per row of each side."""
    kind = torch.float8_e4m3fn
    scales = [one.abs().amax(-1, keepdim=True).float() / torch.finfo(kind).max for one in (x, weight)]
    left, right = ((one / scale).to(kind) for one, scale in zip((x, weight), scales, strict=True))
    run = partial(torch._scaled_mm, left, right.T, scale_a=scales[0], scale_b=scales[1].T, out_dtype=torch.bfloat16)
    run()  # raises where it is not supported
    return run


def eight_layers_of_8b(toy: bool) -> Iterator[Row]:
    """Training at the width of an 8B model by what is recomputed: tokens/s, MFU by our count, memory beside the plan's, kernels by kind."""
    for policy in POLICIES:
        try:
            yield from ({"recomputed": policy} | row for row in _training(toy, policy))
        except torch.OutOfMemoryError as refusal:
            yield {"recomputed": policy, "out_of_memory": str(refusal)[:200]}


def _training(toy: bool, policy: str) -> Iterator[Row]:
    device, peak = the_device(), measure_peak()
    length, micro, rows = (64, 1, 2) if toy else (4096, 2, 4)
    torch._dynamo.reset()
    fresh_memory(device)
    recipe = recipe_of(TINY if toy else WIDTH_8B, length, rows, f"train.activation_checkpointing={policy}")
    began = time.perf_counter()
    model, optimizer = build(recipe, device, random_fill=True)
    batch = batch_of(recipe, rows, length, documents=2)

    def one_step() -> float:
        begin = time.perf_counter()
        step(model, optimizer, batch, micro)
        wait(device)
        return time.perf_counter() - begin

    for _ in range(3):
        one_step()
    warm = time.perf_counter() - began
    took = statistics.median(one_step() for _ in range(5))
    speed, flops = rows * length / took, flops_per_token(recipe.model, length).total
    planned = memory(recipe, load_cluster("8xh100"), Layout(), length, micro, rows // micro).total
    yield {"parameters": sum(one.numel() for one in model.parameters()), "warm_seconds": warm, "step_seconds": took,
           "tokens_per_second": speed, "mfu": speed * flops / peak, "peak_tflops": peak / 1e12, "micro_batch_size": micro,
           "memory_gib": memory_bytes() / GIB, "planned_gib": planned / GIB}  # fmt: skip
    yield {"kernels": kernels(one_step, device)}


_KINDS = (("attention", ("flash", "fmha", "flex", "attention", "sdpa")), ("product", ("gemm", "mm", "matmul", "cutlass", "nvjet", "wgmma")),
          ("copy", ("memcpy", "memset", "copy", "clone")), ("collective", ("nccl",)), ("fused", ("triton",)))  # fmt: skip


def kernels(work, device: torch.device) -> Row:  # type: ignore[no-untyped-def]
    """The device's time in one call, by kind of kernel and for the twelve that take most, in milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
        work()
        wait(device)
    kinds: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = {}
    launched = 0
    for one in found.key_averages():
        spent = (one.self_device_time_total if cuda else one.self_cpu_time_total) / 1e3
        if cuda and one.device_type != torch.autograd.DeviceType.CUDA:
            continue
        launched += one.count
        by_name[one.key[:90]] = spent
        kinds[next((kind for kind, parts in _KINDS if any(part in one.key.lower() for part in parts)), "other")] += spent
    most = sorted(by_name.items(), key=lambda pair: -pair[1])[:12]
    return {"launched": launched, "milliseconds": dict(kinds), "most": dict(most)}


def decode(toy: bool) -> Iterator[Row]:
    """Answers of 64 rows at once at the width of an 8B model: tokens/s, operators and host waits of a step."""
    device = the_device()
    rows, prompt, new = (4, 8, 6) if toy else (64, 256, 48)
    recipe = recipe_of(TINY if toy else WIDTH_8B, 64 if toy else 2048)
    model, _ = build(recipe, device, random_fill=True)
    (part,) = model.parts
    model.eval()
    part.requires_grad_(False)
    batch = ContinuousBatch(part, max_rows=rows)
    for row in range(rows):
        batch.add([(7 * row + one) % 500 for one in range(prompt)], GenerateOptions(max_new_tokens=new, temperature=1.0, seed=row))
    began = time.perf_counter()
    while len(batch.step()) < rows:
        pass
    wait(device)
    yield {"prompts_seconds": time.perf_counter() - began, "prompt_tokens": rows * prompt}
    took = []
    for _ in range(new // 2):
        began = time.perf_counter()
        batch.step()
        wait(device)
        took.append(time.perf_counter() - began)
    with Waits(device) as waits:
        batch.step()
    size = sum(one.numel() * one.element_size() for one in part.parameters())
    middle = statistics.median(took)
    yield {"rows": rows, "step_ms": middle * 1e3, "tokens_per_second": rows / middle, "weight_bytes": size,
           "weights_gb_per_second": size / middle / 1e9, "waits": dict(waits.found), "kernels": kernels(batch.step, device)}  # fmt: skip
