"""Text of the user's in the files of a deployment: shell words, YAML, and one-line comments."""

from __future__ import annotations

import shlex
from typing import Any

import yaml


def shell_word(text: str) -> str:
    """One word of a POSIX shell that stands for exactly this text, newlines and quotes included."""
    return "'" + text.replace("'", "'\"'\"'") + "'" if shlex.quote(text) != text else text


def compose_yaml(tree: Any, head: str) -> str:
    """YAML for a compose file: `$` is doubled, because compose substitutes variables in every value."""
    return head + plain_yaml(_doubled(tree))


def plain_yaml(tree: Any) -> str:
    """YAML of a tree of plain values, in ASCII, so that every reader sees the same characters."""
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=False, width=1_000_000, default_flow_style=False))


def _doubled(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _doubled(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_doubled(one) for one in tree]
    return tree.replace("$", "$$") if isinstance(tree, str) else tree
