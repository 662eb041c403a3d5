"""Settings of an engine, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """One setting: an option of the engine's command with its value (None for a switch), or an environment variable (`env`). A `note` is a
    decision that needs no option. `reason` is one line and contains no text of the user's."""

    name: str
    value: str | None
    reason: str
    env: bool = False
    note: bool = False


@dataclass(frozen=True)
class Launch:
    """How an engine is started. `program`: words of the command; `model_option`: words before the path of the model. `key`: how the API
    key gets from its file to the engine: ("env", variable), ("option", option that takes a file) or ("argv", option), which a small
    Python program adds inside the process, where no list of processes shows it. `notes` are paragraphs of the README."""

    program: tuple[str, ...]
    model_option: tuple[str, ...]
    key: tuple[str, str]
    flags: tuple[Flag, ...]
    containerfile: str
    gpu_devices: bool
    notes: tuple[str, ...] = ()
    gguf: bool = False
