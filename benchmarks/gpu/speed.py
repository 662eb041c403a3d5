"""How fast is the device? Attention, products, decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch
import torch.nn.functional as F
from gpu.fp8 import fp8, scaled_product
from gpu.models import TINY, WIDTH_8B, batch_of, build, error, recipe_of, seconds, the_device, times_ms, wait
from gpu.runner import Row
from gpu.soundness import Waits
from gpu.training import kernels
from torch import Tensor

from lmworks.inference.batching import ContinuousBatch
from lmworks.inference.sampling import GenerateOptions
from lmworks.metrics.system import measure_peak
from lmworks.model.attention import attend_fast, attend_plain
from lmworks.model.documents import from_cu_seqlens

_SIZES = {"attention": (4096, 4096), "key and value": (4096, 1024), "gate, up": (4096, 14336), "down": (14336, 4096),
          "head": (4096, 131072)}  # fmt: skip


def attention(toy: bool) -> Iterator[Row]:
    """Attention as a layer calls it, compiled, and each kernel of SDPA, at four shapes: milliseconds and error against fp32."""
    device = the_device()
    shapes = {  # B, H, K, T, C, documents (None: no boundaries are given, and there is no mask), window
        "causal": (1, 4, 2, 64, 16, None, None) if toy else (2, 32, 8, 4096, 128, None, None),
        "causal, one mask": (1, 4, 2, 64, 16, 1, None) if toy else (2, 32, 8, 4096, 128, 1, None),
        "documents": (2, 4, 2, 64, 16, 3, None) if toy else (4, 32, 8, 2048, 128, 6, None),
        "window": (1, 4, 2, 128, 16, None, 32) if toy else (1, 32, 8, 8192, 128, None, 1024),
    }
    for name, (B, H, K, T, C, documents, window) in shapes.items():
        query, key, value = (torch.randn(B, heads, T, C, device=device).bfloat16() for heads in (H, K, K))
        cu_seqlens = None
        if documents is not None:
            cu_seqlens = torch.from_numpy(batch_of(recipe_of(TINY, T), B, T, documents).cu_seqlens).to(device)
        found = from_cu_seqlens((B, T), cu_seqlens, window, device)
        mask = found.window_mask if window else found.mask
        inputs = [one.requires_grad_() for one in (query, key, value)]
        ours = torch.compile(partial(attend_fast, dropout=0.0), dynamic=False)
        with torch.no_grad():
            first = slice(0, 1)
            small = [one[first, : max(1, one.shape[1] // 8)].float() for one in (query, key, value)]  # one sequence, an eighth of the heads
            part = from_cu_seqlens((1, T), None if cu_seqlens is None else cu_seqlens[: documents + 1], window, device)
            expected = attend_plain(*small, part.window_mask if window else part.mask, 0.0)
            apart = error(ours(query, key, value, mask)[first, : expected.shape[1]], expected)
        about = {"shape": name, "arm": "lmworks", "error": apart, "mask": mask is not None,
                 "blocks": mask is not None and mask.blocks is not None}  # fmt: skip
        yield about | times_ms(partial(ours, *inputs, mask), inputs, device)
        if mask is None:
            yield from _sdpa(name, inputs, device)
        if not apart < 0.02:
            raise AssertionError(f"{name}: attention differs from fp32 by {apart:.2g}")


def _sdpa(name: str, inputs: list[Tensor], device: torch.device) -> Iterator[Row]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "default"):
        kinds = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        try:
            with sdpa_kernel(kinds if backend == "default" else getattr(SDPBackend, backend)):
                yield {"shape": name, "arm": f"sdpa {backend}"} | times_ms(
                    lambda: F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True), inputs, device
                )
        except RuntimeError as refusal:
            yield {"shape": name, "arm": f"sdpa {backend}", "refused": str(refusal)[:150]}


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
            row["fp8 rowwise"] = work / seconds(partial(scaled_product, fp8(x), fp8(weight)), device)
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
