"""Recipes and other files as JSON Schema (draft 2020-12), for editors and scripts: descriptions, units, defaults, enumerations.

A file that the schema rejects, lmworks rejects; not the other way round: values that exclude one another, and sums, need the loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from lmworks.recipe.keys import nodes_of
from lmworks.recipe.schema.base import Node

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Generator(GenerateJsonSchema):
    """Pydantic's generator, with the texts that may stand for a map, and without titles that repeat the names of keys."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        node, found = schema["cls"], super().model_schema(schema)
        if issubclass(node, Node) and node.text_form is not None:
            return {"description": found.pop("description", ""), "anyOf": [node.text_form, found]}
        return found

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(title: str, node: type[Node] | Mapping[str, type[Node]]) -> dict[str, Any]:
    """The JSON Schema of a file that a node describes, or one of several, by the name that `kind` has in each."""
    nodes = {None: node} if isinstance(node, type) else dict(node)
    definitions: dict[str, Any] = {}
    parts = []
    for kind, one in nodes.items():
        part = one.model_json_schema(schema_generator=_Generator)
        _describe_sections(one, part)
        if kind is not None:
            part["properties"]["kind"] = {"const": kind}
        definitions |= part.pop("$defs", {})
        parts.append(part)
    body = parts[0] if len(parts) == 1 else {"anyOf": parts}
    return {"$schema": DIALECT, **body, "title": title, "$defs": dict(sorted(definitions.items()))}


def _describe_sections(node: type[Node], schema: dict[str, Any]) -> None:
    """A section without a description of its own has that of its node, in which an editor finds it."""
    for below, part in ((node, schema), *((below, schema.get("$defs", {}).get(below.__name__, {})) for below in _below(node, {}))):
        for key, field in below.model_fields.items():
            found = part.get("properties", {}).get(key)
            inner = nodes_of(field.annotation)
            if found is not None and "description" not in found and inner and inner[0].__doc__:
                found["description"] = " ".join(inner[0].__doc__.split())


def _below(node: type[Node], found: dict[type[Node], None]) -> list[type[Node]]:
    for field in node.model_fields.values():
        for below in nodes_of(field.annotation):
            if below not in found:
                found[below] = None
                _below(below, found)
    return list(found)
