"""One table of GPUs for plans and deployments."""

from __future__ import annotations

import pytest

from lmworks.deploy.sizing import parse_gpus as deployed
from lmworks.errors import UserError
from lmworks.host.devices import GPUS, parse_gpus
from lmworks.recipe.load import load_cluster, shipped


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("count", [1, 8])
def test_plan_and_deploy_know_the_same_names(name: str, count: int) -> None:
    planned, hardware = load_cluster(f"{count}x{name}"), deployed(f"{count}x{name}")
    assert (planned.nodes * planned.devices_per_node, hardware.count) == (count, count)
    assert planned.memory_gib * 2**30 == pytest.approx(hardware.memory, rel=5e-3)
    assert planned.tflops == GPUS[name].tflops


@pytest.mark.parametrize("name", [name for name in shipped("clusters") if name != "2-cores"])
def test_cluster_files_agree_with_the_table(name: str) -> None:
    cluster = load_cluster(name)
    count, gpu = parse_gpus(name, "--cluster")
    assert (cluster.nodes * cluster.devices_per_node, cluster.device.lower(), cluster.tflops) == (count, gpu.name, gpu.tflops)
    assert cluster.memory_gib == pytest.approx(gpu.memory * 1e9 / 2**30, rel=5e-3)


def test_figures_are_consistent() -> None:
    for gpu in GPUS.values():
        # a card reads its own memory in 10 to 80 ms, and multiplies 30 to 500 bf16 numbers for each byte that it reads
        assert 0.009 < gpu.memory / gpu.bandwidth < 0.09, gpu
        assert 30 < gpu.tflops * 1e3 / gpu.bandwidth < 500, gpu
        assert not (gpu.fp8 and gpu.name.startswith(("a", "rtx3", "rtxa")))


def test_spellings() -> None:
    for text in ("8xRTX4090", "8 x rtx 4090", "8x4090", "8xNVIDIA GeForce RTX 4090"):
        assert parse_gpus(text, "--gpus") == (8, GPUS["rtx4090"])
    assert parse_gpus("a100-80gb", "--gpus") == (1, GPUS["a100"])
    assert parse_gpus("2xh100-nvl", "--gpus")[1].memory == 94
    for text in ("", "x", "8x", "0xh100", "8xh100x", "h1000", "9" * 50 + "xh100", "8xh100;", "-1xh100", "1.5xh100"):
        with pytest.raises(UserError, match=r"^--gpus "):
            parse_gpus(text, "--gpus")
    with pytest.raises(UserError, match="more than 8 GPUs are machines of 8; take 16xrtx3090"):
        load_cluster("12xrtx3090")
    with pytest.raises(UserError, match=r"there is no cluster '3xfoo'.*a number of GPUs such as 4xrtx4090, of: rtx3060"):
        load_cluster("3xfoo")
