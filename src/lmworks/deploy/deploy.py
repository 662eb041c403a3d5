"""Writes the directory of a deployment: engine, check, monitoring."""

from __future__ import annotations

import ipaddress
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import lmworks
from lmworks.deploy import check, monitoring
from lmworks.deploy.engines import engine_of
from lmworks.deploy.files import SUMS, address, compose_yaml, plain_yaml, readme, start_script
from lmworks.deploy.request import Launch, Request, record, tolerance_for
from lmworks.deploy.sizing import Hardware, fit, scenario_of
from lmworks.deploy.source import Source
from lmworks.errors import UserError
from lmworks.export.gguf import weight_bits
from lmworks.io.destinations import require_empty
from lmworks.io.files import whole_directory, write_json, write_text
from lmworks.recipe.weight_files import INDEX, left_aside
from lmworks.weights.huggingface import PICKLED, only_pickled
from lmworks.weights.verified import hash_files, verify_export

CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # of PyTorch's builds without CUDA
_UNREAD = (".md", ".gguf", *(pattern.removeprefix("*") for pattern in PICKLED))  # beside safetensors, no engine reads these


@dataclass(frozen=True)
class Deployment:
    """What was decided: the request of the engine, and how the engine is started."""

    engine: str
    request: Request
    launch: Launch

    def as_json(self) -> dict[str, Any]:
        """For `--json`: the division and every flag with its reason."""
        request = self.request
        return {
            "engine": self.engine, "scenario": request.scenario.name, "hardware": asdict(request.hardware), "model": request.source.name,
            "fit": asdict(request.fit), "flags": [asdict(flag) for flag in self.launch.flags],
        }  # fmt: skip


def plan_deployment(
    source: Source, engine: str, scenario: str, hardware: Hardware, *, context: int | None = None, host: str = "127.0.0.1", port: int = 8000
) -> Deployment:
    """Decide how `source` is served. Raises `UserError` for unknown names, and for a model that does not fit `hardware`."""
    kind, purpose = engine_of(engine), scenario_of(scenario)
    if kind.gguf and source.gguf is None:
        raise UserError("llama.cpp reads one GGUF file: export one (--set export.gguf=true), or say which with --gguf FILE")
    if not kind.gguf and not source.weight_bytes:
        why = only_pickled(source.directory)
        raise UserError(f"{engine} reads .safetensors files, and {source.directory} has none{why}; or use --engine llama.cpp")
    others = () if kind.gguf or engine == "lmworks" or (source.directory / INDEX).is_file() else left_aside(source.directory)
    if others:
        raise UserError(
            f"{engine} would read {', '.join(others)} too, which are no weights of this model; move them out of {source.directory}"
        )
    found = fit(source, hardware, purpose, kind, context)
    request = Request(source, hardware, purpose, found, host, port)
    return Deployment(engine, request, kind.launch(request))


def write_deployment(
    plan: Deployment, out: Path, *, key_file: Path | None = None, expected: Path | None = None, trainer: str | None = None
) -> None:
    """Write all files to `out`, which must not exist or be empty. Answers are recorded from the model, or copied from `expected`.

    Nothing is left of a deployment that could not be written. Raises `UserError`, also if the files of the model are not those that passed
    a comparison whose report is beside them.
    """
    out = Path(out)
    require_empty(out)
    source = plan.request.source
    try:
        key = check.read_key(key_file) or secrets.token_urlsafe(32)
        given = None if expected is None else check.read_expected(expected)
    except check.Refused as error:
        raise UserError(str(error)) from None
    verify_export(source.served(plan.launch.gguf))  # which may take minutes
    answers = given or record(source)
    bits = weight_bits(source.gguf) if engine_of(plan.engine).gguf and source.gguf is not None else source.bits
    answers = answers | {"tolerance": tolerance_for(float(answers["tolerance"]), bits), "name": source.name}
    with whole_directory(out) as aside:
        _write(plan, aside, key, answers, trainer)


def _write(plan: Deployment, out: Path, key: str, answers: dict[str, Any], trainer: str | None) -> None:
    request, launch, engine = plan.request, plan.launch, plan.engine
    (out / "secrets").mkdir(mode=0o700)
    write_text(out / "secrets" / "api_key", key + "\n", private=True)
    write_text(out / "secrets" / "grafana_password", secrets.token_urlsafe(24), private=True)
    for name in ("prometheus", "grafana"):
        (out / "data" / name).mkdir(parents=True, mode=0o700)
    write_json(out / "expected.json", answers)
    shutil.copyfile(check.__file__, out / "check.py")
    write_text(out / SUMS, _sums(request.source.served(launch.gguf)))
    write_text(out / "start.sh", start_script(request, launch))
    (out / "start.sh").chmod(0o755)
    write_text(out / "Containerfile", launch.containerfile)
    write_text(out / ".dockerignore", "secrets\ndata\n")
    write_text(out / "compose.yaml", compose_yaml(request, launch))
    write_text(out / "prometheus.yml", plain_yaml(monitoring.scraping(engine, address(request), trainer)))
    write_text(out / "rules.yml", plain_yaml(monitoring.alert_rules(engine, training=trainer is not None)))
    folder = out / "grafana" / "provisioning"
    write_text(folder / "datasources" / "prometheus.yaml", plain_yaml(monitoring.filled("datasources")))
    write_text(folder / "dashboards" / "lmworks.yaml", plain_yaml(monitoring.filled("providers")))
    dashboards = out / "grafana" / "dashboards"
    write_json(dashboards / "serving.json", monitoring.dashboard("serving", monitoring.serving_panels(engine)))
    if trainer is not None:
        write_json(dashboards / "training.json", monitoring.dashboard("training", monitoring.training_panels(request.source.model)))
    if engine == "lmworks":
        _copy_package(out, request.hardware.on_cpu)
    write_json(out / "decisions.json", plan.as_json())
    write_text(out / "README.md", readme(plan.engine, request, launch, trainer))


def _sums(model: Path) -> str:
    """Hashes of what an engine reads, as `sha256sum --check` wants them: of a file on standard input, or of the files of a directory."""
    if model.is_file():
        return f"{hash_files([model])[model]}  -\n"
    files = [file for file in sorted(model.iterdir()) if file.is_file() and file.name[0] != "." and file.suffix not in _UNREAD]
    return "".join(_sum_line(digest, file.name) for file, digest in hash_files(files).items())


def _sum_line(digest: str, name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n"


def _copy_package(out: Path, on_cpu: bool) -> None:
    """The package of lmworks, and the versions of what it needs, for its container. On a CPU torch is the build without CUDA, which is in
    PyTorch's own index: the package index has the one with CUDA, of some gigabytes more."""
    package = Path(lmworks.__file__).parent
    shutil.copytree(package, out / "package" / "lmworks", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    lines = list(_requirements())
    if on_cpu:
        lines = [f"--extra-index-url {CPU_INDEX}", *(f"{line}+cpu" if line.startswith("torch==") else line for line in lines)]
    write_text(out / "requirements.txt", "\n".join(lines) + "\n")


def _requirements() -> Iterator[str]:
    """Direct requirements of the base install and of the extra `serve`, in the installed versions."""
    for text in metadata.requires("lmworks") or ():
        requirement, _, marker = text.partition(";")
        if not marker or re.search(r"extra == .serve.", marker):
            name = re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0]
            yield f"{name}=={metadata.version(name).partition('+')[0]}"  # without the label of a local build


_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?\Z")


def require_host(text: str, option: str) -> None:
    """Raise `UserError` unless `text` is an IP address, without a zone, which may be any text, or a host name."""
    try:
        fits = not getattr(ipaddress.ip_address(text), "scope_id", None)
    except ValueError:
        fits = _NAME.match(text) is not None
    if not fits:
        raise UserError(f"{option} {text!r} is neither an IP address nor a host name")


def require_port(port: int) -> None:
    """Raise `UserError` for a port of another program of the deployment: all use the network of the host."""
    if found := monitoring.PORTS.get(port):
        raise UserError(f"--port {port} is that of {found} in the same deployment; choose another")


def require_target(text: str, engine_port: int) -> None:
    """Raise `UserError` unless `text` is HOST:PORT, and no program of the deployment itself."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not port.isascii() or not 0 < int(port) < 65536:
        raise UserError(f"--trainer {text!r} must be HOST:PORT, such as 127.0.0.1:9400")
    host = host.removeprefix("[").removesuffix("]")
    require_host(host, "--trainer")
    found = (monitoring.PORTS | {engine_port: "the engine"}).get(int(port))
    if found and host in ("127.0.0.1", "localhost", "::1"):
        raise UserError(f"--trainer {text} is the address of {found} in this deployment; name the trainer's metrics.prometheus_port")
