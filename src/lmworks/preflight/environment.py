"""Checks of installed packages, hardware, the plan, and the network between ranks, which is measured and compared with the plan."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from lmworks.parallel.bandwidth import all_reduce_speed
from lmworks.preflight.check_result import CheckContext, CheckResult
from lmworks.recipe.schema.layout import world_size
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.amounts import size

_OLDEST_TORCH = (2, 11)
_FILES = 1024  # that one process may have open


def needed(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """The optional modules that the recipe needs: module, extra, and what needs it."""
    tasks = bool(recipe.evaluate.tasks) or any(data.kind == "tasks" for data in (recipe.tune.data if recipe.tune else ()))
    cache = recipe.shards.cache
    for module, extra, why, asked in (
        ("transformers", "export", "export.huggingface", recipe.export.huggingface),
        ("gguf", "export", "export.gguf", recipe.export.gguf),
        ("reasoning_gym", "eval", "the reasoning tasks", tasks),
        ("tensorboard", "tensorboard", "metrics.tensorboard", recipe.metrics.tensorboard),
        ("wandb", "wandb", "metrics.wandb_project", recipe.metrics.wandb_project is not None),
        ("prometheus_client", "prometheus", "metrics.prometheus_port", recipe.metrics.prometheus_port is not None),
        ("fsspec", "data", "checkpoints.copy_to", "://" in (recipe.checkpoints.copy_to or "")),
        ("fsspec", "data", "shards.cache.remote", "://" in ((cache and cache.remote) or "")),
    ):
        if asked:
            yield module, extra, why


def versions(context: CheckContext) -> CheckResult:
    """Check Python, torch, the extras that the recipe needs, the limit of open files, and hardware support for the precision."""
    import resource

    import torch

    from lmworks.host.devices import has_bf16

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda" if gpus else "cpu")
    where = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "CPU"
    text = f"Python {platform.python_version()}, torch {torch.__version__}, lmworks {metadata.version('lmworks')}, {where}"
    absent = [(module, extra, why) for module, extra, why in needed(context.recipe) if find_spec(module) is None]
    if absent:
        extras = ",".join(sorted({extra for _, extra, _ in absent}))
        names = ", ".join(f"{m} (for {w})" for m, _, w in absent)
        return CheckResult("fail", f"{text}; missing: {names}", f"pip install 'lmworks[{extras}]'")
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < _OLDEST_TORCH:
        return CheckResult("fail", f"{text}; torch is too old", "pip install 'torch>=2.11'")
    per_node = context.cluster.devices_per_node if context.cluster else gpus
    if gpus and gpus != per_node:
        return CheckResult("warn", f"{text}; the cluster file says {per_node} devices per node", "correct it, or find the missing devices")
    if (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < _FILES:
        return CheckResult("warn", f"{text}; a process may open only {limit} files", "ulimit -n 65536")
    if context.recipe.train.precision == "bf16" and not has_bf16(device):
        return CheckResult("warn", f"{text}; no bf16 in this hardware, so it is slow", "--set train.precision=auto")
    return CheckResult("ok", text)


def planned(context: CheckContext) -> CheckResult:
    """Check that the layout is legal and fits, and report the plan's warnings."""
    from lmworks.plan.layout import describe
    from lmworks.plan.memory import GIB
    from lmworks.ui.amounts import days

    plan = context.plan
    fullest = max(plan.phases, key=lambda phase: phase.placed.memory.total)
    text = (
        f"{describe(fullest.placed.layout)} on {plan.devices:,} x {plan.cluster.device}: {fullest.placed.memory.total / GIB:.1f} of "
        f"{plan.cluster.memory_gib:g} GiB, {plan.steps:,} steps in {days(plan.seconds)} at {plan.mfu:.0%} MFU"
    )
    figures = {"memory_bytes": fullest.placed.memory.total, "seconds": plan.seconds}
    unwise = list(plan.warnings())
    if unwise:
        return CheckResult("warn", f"{text}; {unwise[0]}", f"lmworks plan {context.name} shows all {len(unwise)} warnings", figures)
    return CheckResult("ok", text, figures=figures)


_SHARE_OF_NETWORK = 0.5  # of the stated bandwidth; less indicates a wrong route or a bad cable
_SHARE_OF_STEP = 0.5  # of a step for gradient communication; less can overlap with the backward pass


def network(context: CheckContext) -> CheckResult:
    """Latency and bus bandwidth of an all-reduce along every axis with more than one rank; collective."""
    ranks = context.ranks
    if ranks is None:
        wanted = world_size(context.layout)
        if wanted == 1:
            return CheckResult("skip", "there is only one rank")
        launch = f"lmworks launch local {context.name} --to preflight"
        return CheckResult("skip", f"this is one process, and the layout has {wanted:,} ranks", launch)
    figures: dict[str, float] = {}
    texts = []
    slowest = float("inf")
    for axis in ("tp", "cp", "pp", "fsdp", "dp_replicate", "ep"):
        if ranks.size(axis) == 1:
            continue
        latency, bandwidth = all_reduce_speed(ranks, axis)
        figures |= {f"{axis}/latency_seconds": latency, f"{axis}/bytes_per_second": bandwidth}
        texts.append(f"{axis} of {ranks.size(axis)}: {1e6 * latency:,.0f} us, {size(bandwidth)}/s")
        if axis in ("fsdp", "dp_replicate"):
            slowest = min(slowest, bandwidth)
    if not texts:
        return CheckResult("skip", "there is only one rank")
    text = "; ".join(texts)
    link = context.machine.network_gbps / 8 * 1e9
    if link and slowest < _SHARE_OF_NETWORK * link:
        advice = "look for a wrong interface (NCCL_SOCKET_IFNAME, NCCL_IB_HCA), a slow node or a bad cable"
        return CheckResult("warn", f"{text}; the cluster states {size(link)}/s", advice, figures)
    if slowest < float("inf"):
        plan = context.plan
        travel = 2 * plan.counts.total / ranks.size("tp") / ranks.size("pp") * 4 / slowest  # fp32: gradients reduced, weights gathered
        step = plan.seconds / plan.steps
        figures |= {"gradient_seconds": travel, "step_seconds": step}
        text += f"; gradient communication takes {travel:.2g} s of a step of {step:.2g} s"
        if travel > _SHARE_OF_STEP * step:
            return CheckResult("warn", text, "use a larger batch, layout.dp_replicate across slow links, or a faster network", figures)
    return CheckResult("ok", text, figures=figures)
