"""Parts of a step by themselves: the head's loss, Newton-Schulz, casts of weights, fp8, and a sparse layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from gpu.fp8 import Fp8Linear
from gpu.models import compiled, error, fresh_memory, seconds, the_device, times_ms
from gpu.runner import Row
from torch import Tensor

from lmworks.metrics.system import memory_bytes
from lmworks.model import linear_kernels
from lmworks.model.delta_rule import delta_rule
from lmworks.model.loss import chunk_loss, head_loss
from lmworks.model.moe import MoE, combine, dispatch, run_sorted
from lmworks.model.ssd import scan
from lmworks.optim.muon import orthogonalize
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.model import Moe

GIB = 2**30
_STEPS = 5  # of Newton-Schulz
_STACK = 1 << 27  # elements of a stack of matrices on a GPU, as Muon has them
_WIDTH, _HIDDEN = 4096, 14336  # of an 8B model


def head_losses(toy: bool) -> Iterator[Row]:
    """The head's loss with both gradients by the tokens of a chunk and the vocabulary: time, and memory at the most beside that before."""
    device = the_device()
    tokens, width = (128, 64) if toy else (16384, _WIDTH)
    for vocabulary in (512, 1024) if toy else (32768, 151552):
        hidden_ND = torch.randn(tokens, width, device=device).bfloat16().requires_grad_()
        weight_VD = torch.randn(vocabulary, width, device=device).mul_(0.02).requires_grad_()
        labels_N = torch.randint(vocabulary, (tokens,), device=device)
        for chunk in (16, 32, 64, 128) if toy else (512, 1024, 2048, 4096, 8192, 16384):
            of_chunk = compiled(chunk_loss, device)

            def loss(chunk: int = chunk, of_chunk: Callable = of_chunk, given: tuple = (hidden_ND, weight_VD, labels_N)) -> None:  # type: ignore[type-arg]
                total, _ = head_loss(*given, softcap=0.0, z_weight=1e-4, chunk=chunk, chunk_loss=of_chunk)
                torch.autograd.grad(total, given[:2])

            row = {"vocabulary": vocabulary, "tokens": tokens, "chunk": chunk}
            try:
                fresh_memory(device)
                before = memory_bytes()
                took = seconds(loss, device, rounds=5)
                yield row | {"ms": took * 1e3, "memory_gib": (memory_bytes() - before) / GIB,
                             "tflops": 6e-12 * tokens * width * vocabulary / took}  # fmt: skip
            except torch.OutOfMemoryError as refusal:
                yield row | {"out_of_memory": str(refusal)[:200]}


def orthogonalizations(toy: bool) -> Iterator[Row]:
    """Newton-Schulz by the shape of the matrices, in stacks as Muon has them."""
    device = the_device()
    shapes = {"attention": (32, 4096, 4096), "key, value": (64, 1024, 4096), "gate, up, down": (96, 4096, 14336),
              "experts, 15B": (64, 1280, 2048), "experts, 355B": (160, 1536, 5120)}  # fmt: skip
    if toy:
        shapes = {"attention": (2, 64, 64), "experts": (8, 32, 64)}
    for name, (most, rows, cols) in shapes.items():
        count = max(1, min(most, _STACK // (rows * cols)))
        stack = torch.randn(count, rows, cols, device=device).bfloat16()
        took = seconds(lambda stack=stack: orthogonalize(stack, _STEPS), device, rounds=5)  # type: ignore[misc]
        flops = _STEPS * count * (4.0 * rows * rows * cols + 2.0 * rows**3)
        yield {"shape": name, "stack": [count, rows, cols], "ms": took * 1e3, "ms_per_matrix": took * 1e3 / count,
               "tflops": flops / took / 1e12}  # fmt: skip


def _block(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, linear: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def _cast(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def _feed_forward(toy: bool, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The input of a feed-forward block in bf16, and its weights in fp32."""
    tokens, width, hidden = (64, 64, 128) if toy else (16384, _WIDTH, _HIDDEN)
    x = torch.randn(tokens, width, device=device).bfloat16().requires_grad_()
    shapes = ((hidden, width), (hidden, width), (width, hidden))
    return x, [torch.randn(shape, device=device).mul_(0.02).requires_grad_() for shape in shapes]


def shadow_weights(toy: bool) -> Iterator[Row]:
    """What a bf16 copy of the weights, made once a step, would save of a feed-forward block: per micro-batch, the gradients added up in
    fp32."""
    device = the_device()
    x, weights = _feed_forward(toy, device)
    shadow = [one.detach().bfloat16().requires_grad_() for one in weights]
    sums = [torch.zeros_like(one) for one in weights]
    block = compiled(lambda x, *given: _block(x, *given, linear=_cast), device)

    def micro_batch(given: list[Tensor]) -> None:
        _, *grads = torch.autograd.grad(block(x, *given).sum(), [x, *given])
        for total, grad in zip(sums, grads, strict=True):
            total += grad

    cast = seconds(lambda: [copy.detach().copy_(one) for copy, one in zip(shadow, weights, strict=True)], device)
    each, once = (seconds(lambda given=given: micro_batch(given), device) for given in (weights, shadow))  # type: ignore[misc]
    size = sum(one.numel() for one in weights)
    yield {"parameters": size, "cast_ms": cast * 1e3, "cast_gb_per_second": 6 * size / cast / 1e9, "tokens": len(x),
           "cast_each_time_ms": each * 1e3, "cast_before_ms": once * 1e3, "saved_ms_per_micro_batch": (each - once) * 1e3,
           "saved_share": (each - once) / each}  # fmt: skip


def fp8_block(toy: bool) -> Iterator[Row]:
    """A feed-forward block forward and backward in bf16 and in fp8 with a scale per row: time, and the errors against fp32."""
    device = the_device()
    x, wide = _feed_forward(toy, device)
    weights = [one.detach().bfloat16().requires_grad_() for one in wide]
    grad = torch.randn(x.shape, device=device)
    exact = [one.detach().bfloat16().float().requires_grad_() for one in (x, *wide)]
    expected = _results(lambda *given: _block(*given, linear=F.linear), exact, grad)
    for name, linear, most in (("bf16", F.linear, 0.02), ("fp8 rowwise", Fp8Linear.apply, 0.15)):
        block = compiled(lambda *given, linear=linear: _block(*given, linear=linear), device)
        inputs = [x, *weights]
        try:
            found = _results(block, inputs, grad.bfloat16())
        except (RuntimeError, NotImplementedError, AttributeError) as refusal:
            if name == "bf16":
                raise
            yield {"block": name, "refused": f"{type(refusal).__name__}: {refusal}"[:300]}
            continue
        errors = dict(zip(("out", "x", "gate", "up", "down"), map(error, found, expected), strict=True))
        times = times_ms(lambda block=block, inputs=inputs: block(*inputs), inputs, device)  # type: ignore[misc]
        flops = 6.0 * len(x) * sum(one.numel() for one in weights)
        yield {"block": name, "tokens": len(x), "errors": errors, "tflops": flops / times["both_ms"] / 1e9} | times
        if not max(errors.values()) < most:
            raise AssertionError(f"{name}: the block differs from fp32 by {max(errors.values()):.2g}")


def _results(block: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = block(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def linear_attention(toy: bool) -> Iterator[Row]:
    """The recurrences of Qwen3-Next's gated delta rule and of Falcon-H1-7B's Mamba-2 over documents, compiled: in chunks of plain
    operators, and by flash-linear-attention where it is installed; milliseconds and the error against fp32."""
    device = the_device()
    shapes = {"gated delta rule": (16, 32, 128, 128), "Mamba-2": (1, 24, 256, 128)}  # heads of keys and of values, widths of both
    tokens = 128 if toy else 8192
    positions_BT = torch.arange(tokens, device=device).remainder(tokens // 4)[None]
    for name, (G, H, K, V) in shapes.items():
        G, H, K, V = (max(1, one // 16) for one in (G, H, K, V)) if toy else (G, H, K, V)
        query, key = (F.normalize(torch.randn(1, tokens, G, K, device=device), dim=-1).bfloat16() for _ in range(2))
        value = torch.randn(1, tokens, H, V, device=device).bfloat16()
        given = [query, key, value, -torch.rand(1, tokens, H, device=device)]
        given += [torch.rand(1, tokens, H, device=device)] if name == "gated delta rule" else []
        run = delta_rule if name == "gated delta rule" else scan
        inputs = [one.requires_grad_() for one in given]
        with torch.no_grad():
            expected = run(*(one.float() for one in inputs), positions_BT)[0]
        for kernel in (False, True) if linear_kernels.usable(value) else (False,):
            linear_kernels.usable = lambda *_, kernel=kernel: kernel
            whole = compiled(lambda *inputs, run=run: run(*inputs, positions_BT)[0], device)
            apart = error(whole(*inputs), expected)
            row = {"recurrence": name, "kernel": kernel, "tokens": tokens, "error": apart}
            yield row | times_ms(partial(whole, *inputs), inputs, device)
            if not apart < 0.02:
                raise AssertionError(f"{name}: the recurrence differs from fp32 by {apart:.2g}")


def sparse_layer(toy: bool) -> Iterator[Row]:
    """The parts of a sparse layer with all its experts, each as training computes it: milliseconds forward, and with the backward pass."""
    if toy:
        moe = Moe(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1)
        yield from ({"model": "toy"} | row for row in _parts_of(moe, 64, 64, the_device()))
        return
    for name, tokens in (("glm-15b-a3b", 16384), ("glm46-355b-a32b", 8192)):
        model = load_recipe(name).recipe.model
        assert model.moe is not None and model.hidden_size is not None
        yield from ({"model": name} | row for row in _parts_of(model.moe, model.hidden_size, tokens, the_device()))


def _parts_of(moe: Moe, width: int, tokens: int, device: torch.device) -> Iterator[Row]:
    fresh_memory(device)
    with device:
        layer = MoE(moe, width)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.02)
        x_BTD = torch.randn(1, tokens, width, device=device).bfloat16()
        routing = layer.router(x_BTD)
        rows_MD, weights_M, places = dispatch(x_BTD[0], routing)
        ends_E = routing.counts.cumsum(0).to(torch.int32)
    yield {"tokens": tokens, "rows": len(rows_MD), "busiest_expert": float(routing.counts.max() / routing.counts.mean())}
    wide = [layer.experts.gate, layer.experts.up, layer.experts.down]
    narrow = [one.detach().to(x_BTD.dtype).requires_grad_() for one in wide]
    took = seconds(lambda: [copy.detach().copy_(one) for copy, one in zip(narrow, wide, strict=True)], device)
    yield {"part": "cast of weights", "forward_ms": took * 1e3}
    x_BTD.requires_grad_()
    x_ND, rows_MD = x_BTD.detach()[0].requires_grad_(), rows_MD.requires_grad_()
    parts: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "router": (lambda x, _: layer.router(x).weights, [x_BTD, layer.router.weight]),
        "sorting": (lambda x: dispatch(x, routing)[0], [x_ND]),
        "grouped products": (lambda rows, *given: run_sorted(rows, weights_M, ends_E, *given), [rows_MD, *narrow]),
        "combining": (lambda rows: combine(rows, places), [rows_MD]),
        "whole layer": (lambda x, *_: layer(x)[0], [x_BTD, *layer.parameters()]),
    }
    if (shared := layer.shared) is not None:
        parts["shared expert"] = (lambda x, *_: shared(x), [x_BTD, *shared.parameters()])
    for part, (run, inputs) in parts.items():
        times = times_ms(partial(compiled(run, device), *inputs), inputs, device)
        products = 6e-9 * len(rows_MD) * 3 * width * moe.moe_intermediate_size
        yield {"part": part} | times | ({"tflops": products / times["both_ms"]} if part == "grouped products" else {})
