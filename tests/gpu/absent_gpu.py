"""Kernels for an H100 from a torch that is built with CUDA, on a machine without a GPU: what the compiler generates is compiled to machine
code and counted, not run.

`absent_gpu.py LIBRARY CASE...` prints the kernels of the compiled layers of each case, forward and backward, as JSON in the last line. The
library (`absent_gpu.cpp`) is preloaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

LENGTH = 1024
CASES: dict[str, dict[str, Any]] = {
    "shared heads": {},
    "windows": {"sliding_window": 512, "layer_types": ["sliding_attention"]},
    "latent": {"num_key_value_heads": 8, "head_dim": 192, "mla": {
        "q_lora_rank": None, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    }},
    "experts": {"moe": {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 0}},
    "adapters": {},
}  # fmt: skip
_MODEL = {
    "vocab_size": 1024, "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 1536,
}  # fmt: skip
_SHARED_MEMORY = 232_448  # bytes that a block of an H100 may have


class Generated(Exception):
    """In place of running what was generated."""


def main() -> None:
    library, *cases = sys.argv[1:]
    generated = _pretend(library)
    found = {}
    for case in cases:
        generated.clear()
        _compile_layers(case)
        source = "\n".join(line for text in generated for line in text.splitlines() if not line.lstrip().startswith("#"))
        found[case] = {
            "kernels": list(_kernels(source)),
            "called": sorted(set(re.findall(r"(?:extern_kernels|torch\.ops\.\w+)\.(\w+)", source))),
        }
    print(json.dumps(found))


def _pretend(library: str) -> list[str]:
    """Answer as an H100 what torch and Triton ask; what the compiler generates is added to the result and not loaded."""
    import torch
    from torch._dynamo import device_interface
    from torch._functorch import config as functorch
    from torch._inductor import config, graph
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    ctypes.CDLL(library).lmworks_install_absent_gpu()
    about = types.SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=80 << 30, gcnArchName="",
        shared_memory_per_block_optin=_SHARED_MEMORY, L2_cache_size=50 << 20,
    )  # fmt: skip
    asked: dict[str, Any] = {
        "is_available": True, "get_compute_capability": 90, "device_count": 1, "current_device": 0, "synchronize": None,
        "is_triton_capable": True, "raise_if_triton_unavailable": None, "get_device_properties": about, "is_bf16_supported": True,
    }  # fmt: skip
    for name, answer in asked.items():
        setattr(device_interface.CudaInterface, name, staticmethod(lambda *_, answer=answer, **__: answer))
    for name in ("get_device_properties", "current_device"):
        setattr(device_interface.CudaInterface.Worker, name, staticmethod(lambda *_, answer=asked[name], **__: answer))
    answers: dict[str, Any] = {
        "get_device_capability": (9, 0), "get_device_properties": about, "current_device": 0, "_lazy_init": None,
        "get_device_name": about.name, "is_available": False, "set_rng_state": None, "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    fake_tensor.init_gpu_context = lambda _: None  # type: ignore[assignment]
    target = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_device_interface=lambda: torch.cuda
    )  # fmt: skip
    driver.set_active(target)
    config.compile_threads, config.force_disable_caches, config.joint_graph_constant_folding = 1, True, False  # folding would compute
    functorch.force_non_lazy_backward_lowering = True  # compiled together with the forward
    generated: list[str] = []

    def keep(self: Any, *_: Any, **__: Any) -> types.ModuleType:
        generated.append(self.codegen()[0].value)
        module = types.ModuleType("generated")
        module.call, module.__file__, module.recursively_apply_fns = stop, "generated", None  # type: ignore[attr-defined]
        return module

    def stop(_: Any) -> None:
        raise Generated

    graph.GraphLowering.compile_to_module = keep  # type: ignore[method-assign]
    return generated


def _compile_layers(case: str) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lmworks.parallel import parallelize
    from lmworks.parallel.mesh import Ranks
    from lmworks.recipe.schema.layout import Layout
    from lmworks.recipe.schema.model import Lora
    from lmworks.recipe.schema.recipe import Recipe

    torch._dynamo.reset()
    recipe = Recipe.model_validate({"name": "compiled", "model": _MODEL | CASES[case], "train": {"precision": "bf16", "compile": True}})
    device, adapters = torch.device("cuda", 0), Lora(rank=8, alpha=16, targets=("all-linear",)) if case == "adapters" else None
    parallelize.initialize = lambda *_: None  # type: ignore[assignment]  # fake tensors have no values
    with FakeTensorMode(allow_non_fake_inputs=True):
        (model,) = parallelize.build(recipe, Ranks(Layout()), device, adapters)
        model.train()
        tokens_BT = torch.zeros(2, LENGTH, dtype=torch.long, device=device)
        cu_seqlens = torch.zeros(6, dtype=torch.int32, device=device)
        spans = model.spans(tokens_BT, cu_seqlens, None)
        rope, x_BTD = model.rotations(spans)[0], model.embed(tokens_BT).detach().requires_grad_()
        for block in model.layers:
            mask = spans.window_mask if block.attention.slides else spans.mask
            with suppress(Generated):
                block(x_BTD, rope, mask)


def _kernels(source: str) -> Iterator[dict[str, Any]]:
    """Each Triton kernel, compiled to machine code for an H100."""
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    triton_helpers.set_driver_to_gpu = lambda: None
    folder = Path(os.environ["TMPDIR"])
    for number, (name, text) in enumerate(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", source, re.DOTALL)):
        path = folder / f"kernel_{number}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        signature, chosen = kernel.triton_meta["signature"], kernel.configs[0]
        constants = {**kernel.triton_meta.get("constants", {}), **chosen.kwargs}
        constexprs = {(kernel.fn.arg_names.index(key),): value for key, value in constants.items() if signature.get(key) == "constexpr"}
        options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
        made = triton.compile(ASTSource(kernel.fn, signature, constexprs), target=GPUTarget("cuda", 90, 32), options=options)
        yield {
            "name": name, "shared_memory": made.metadata.shared, "tensor_core_products": made.asm["ptx"].count("wgmma.mma_async"),
            "bytes": len(made.asm["cubin"]),
        }  # fmt: skip


if __name__ == "__main__":
    main()
