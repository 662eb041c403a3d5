"""The built-in server: plain PyTorch on one device."""

from __future__ import annotations

from lmworks.deploy.engines.common import UNTRIED, Request
from lmworks.deploy.flags import Flag, Launch
from lmworks.errors import UserError
from lmworks.tokenizer.tool_forms import tool_form

_CONTAINER = """# The server of lmworks, from the copy of its package and the list of versions beside this file.{untried}
FROM python:3.11.13-slim-bookworm
COPY requirements.txt /opt/requirements.txt
RUN pip install --no-cache-dir -r /opt/requirements.txt
COPY package /opt/package
ENV PYTHONPATH=/opt/package
"""


def _tools(template: str) -> str:
    """Which tool calls the server reads in replies of a model with this chat template."""
    form = tool_form(template)
    if form is None:
        return "calls in <tool_call>; other forms stay text"
    return f"tool calls: {form.reason}" if form.marks else f"no tool calls of this form, which stay text: {form.reason}"


def launch(request: Request) -> Launch:
    """Flags of `lmworks serve`. Raises `UserError` for GPUs of AMD, for which the package index has no build of torch."""
    if request.hardware.amd:
        raise UserError("--engine lmworks has no container for GPUs of AMD: use --engine vllm, sglang or llama.cpp")
    flags = (
        Flag("--name", request.source.name, "the name by which clients ask for the model"),
        Flag("--host", request.host, "loopback unless asked: an address of this machine alone"),
        Flag("--port", str(request.port), "the port of the API"),
        Flag("context", None, request.context_reason, note=True),
        Flag("tools", None, f"the server reads <think>, and {_tools(request.source.template)}", note=True),
        Flag("speculation", None, request.no_speculation_reason, note=True),
    )
    program = ("python3", "-m", "lmworks.cli.main", "serve")
    container = _CONTAINER.format(untried="" if request.hardware.on_cpu else f" {UNTRIED}")
    return Launch(program, (), ("env", "LMWORKS_API_KEY"), flags, container, gpu_devices=not request.hardware.on_cpu)
