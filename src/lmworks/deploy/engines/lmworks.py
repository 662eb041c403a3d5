"""The built-in server: plain PyTorch on one device."""

from __future__ import annotations

from lmworks.deploy.engines.common import Request
from lmworks.deploy.flags import Flag, Launch

_CONTAINER = """# The server of lmworks, from the copy of its package and the list of versions beside this file.
FROM python:3.11.13-slim-bookworm
COPY requirements.txt /opt/requirements.txt
RUN pip install --no-cache-dir -r /opt/requirements.txt
COPY package /opt/package
ENV PYTHONPATH=/opt/package
"""


def launch(request: Request) -> Launch:
    """Flags of `lmworks serve`."""
    flags = (
        Flag("--host", request.host, "loopback unless asked: an address of this machine alone"),
        Flag("--port", str(request.port), "the port of the API"),
        Flag("context", None, request.context_reason, note=True),
        Flag("tools", None, "the server reads <think> and the <tool_call> of GLM and Qwen; other forms stay text", note=True),
        Flag("speculation", None, request.no_speculation_reason, note=True),
    )
    program = ("python3", "-m", "lmworks.cli.main", "serve")
    return Launch(program, (), ("env", "LMWORKS_API_KEY"), flags, _CONTAINER, gpu_devices=not request.hardware.on_cpu)
