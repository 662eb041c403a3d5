"""One table of GPUs for plans and deployments."""

from __future__ import annotations

import pytest

from lmworks.deploy.sizing import parse_gpus as deployed
from lmworks.errors import UserError
from lmworks.host.devices import GPUS, find_gpu, parse_gpus
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


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 3090 Ti", "rtx3090ti"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"), ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"), ("NVIDIA RTX A6000", "rtxa6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtxpro6000-maxq"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"), ("AMD Instinct MI355X OAM", "mi355x"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None), ("Tesla V100-SXM2-16GB", None), ("", None),
    ],
)  # fmt: skip
def test_names_that_machines_report_find_their_row(reported: str, name: str | None) -> None:
    found = find_gpu(reported)
    assert (None if found is None else found.name) == name


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("8xh100", (8, "h100")), ("H100:8", (8, "h100")), ("h100x8", (8, "h100")), ("2 x RTX 4090", (2, "rtx4090")),
        ("4090", (1, "rtx4090")),
        ("4x4090", (4, "rtx4090")), ("a100-80g", (1, "a100")), ("2x a100 40GB", (2, "a100-40")), ("8 x H100 SXM5 80GB", (8, "h100")),
        ("6000 ada", (1, "rtx6000ada")), ("rtx pro 6000", (1, "rtxpro6000")), ("mi300x:8", (8, "mi300x")), ("8xmi300x", (8, "mi300x")),
    ],
)  # fmt: skip
def test_spellings_that_people_type(typed: str, meant: tuple[int, str]) -> None:
    for option in ("--cluster", "--gpus"):
        count, gpu = parse_gpus(typed, option)
        assert (count, gpu.name) == meant


def test_unknown_names_get_the_nearest_and_figures_are_consistent() -> None:
    with pytest.raises(UserError, match=r"--gpus '8xh1000' is not known; did you mean h100\?"):
        parse_gpus("8xh1000", "--gpus")
    for gpu in GPUS.values():
        assert find_gpu(gpu.name) is gpu and gpu.board_watts > 50
    assert GPUS["h100"].peak("fp8") == 1978 and GPUS["a100"].peak("fp8") == 312 and GPUS["a100"].peak("tf32") == 156
