"""A recipe file to a resolved recipe: presets under it, overrides over it, derived values filled in, every origin known."""

from __future__ import annotations

import copy
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.host import devices
from lmworks.io import urls
from lmworks.io.files import write_json, write_text
from lmworks.io.masking import holds_secret, mask
from lmworks.recipe import derive, weights
from lmworks.recipe.changes import as_tree, fingerprint
from lmworks.recipe.checks import problems
from lmworks.recipe.document import Document, parse, parse_file, parse_value, read_text, tree_of_json
from lmworks.recipe.families.registry import from_config
from lmworks.recipe.former import translated, translated_document
from lmworks.recipe.keys import Keys, display, get, leaves, locate, merge, nearest, put, refuse_unknown
from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.layout import Cluster
from lmworks.recipe.schema.recipe import Recipe


@dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    kind: Literal["default", "preset", "recipe", "override", "derived"]
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}".strip() if self.kind != "derived" else f"derived: {self.detail}"


N = TypeVar("N", bound=Node)
_TEXT = Path("<text>")  # what messages call a recipe that is in no file
Numbers = Mapping[Keys, tuple[Any, str]]  # values that a run has settled, each with the reason


@dataclass(frozen=True)
class _Source:
    """What a recipe is resolved from."""

    path: Path
    text: str
    document: Document
    overrides: Sequence[str]
    size: str | None
    corpus_only: bool


@dataclass(frozen=True)
class Resolved:
    """A whole recipe: no None is left where a value derives from others."""

    recipe: Recipe
    fingerprint: str
    path: Path
    text: str = field(repr=False)
    source: _Source = field(repr=False)
    _origin: Callable[[Keys], Origin] = field(repr=False, compare=False)

    @cached_property
    def origins(self) -> dict[str, Origin]:
        """Where the value at each path comes from."""
        tree = as_tree(self.recipe)
        return {display(tree, keys): self._origin(keys) for keys, _ in leaves(tree)}

    def settled(self, numbers: Numbers) -> Resolved:
        """The same recipe with these numbers in place of its own, and everything that follows from them derived anew."""
        return _resolve(self.source, numbers)

    def overridden(self, overrides: Sequence[str]) -> Resolved:
        """The same recipe with these overrides (`a.b=c`) after its own."""
        return _resolve(replace(self.source, overrides=[*self.source.overrides, *overrides]), {})

    def save(self, directory: Path) -> None:
        """Write `recipe.yaml` (as the user wrote it), `resolved.json` (every value) and `origins.json` (where each came from) into the run
        directory, and apart from them the credentials of URLs. Origins are kept where the recipe is that of the run itself."""
        tree = as_tree(self.recipe)
        urls.save(directory, tree)
        write_text(directory / "recipe.yaml", self.text)
        write_json(directory / "resolved.json", tree)
        if self.path.name != "resolved.json" or not (directory / "origins.json").exists():
            write_json(directory / "origins.json", {path: {"kind": one.kind, "detail": one.detail} for path, one in self.origins.items()})


def shipped_folder(name: Literal["recipes", "docs"] = "recipes") -> Path:
    """The recipes or the pages of documentation that come with lmworks: of the checkout, or as installed."""
    checkout = Path(__file__).resolve().parents[3] / name
    return checkout if checkout.is_dir() else Path(sysconfig.get_path("data")) / "share" / "lmworks" / name


def shipped(kind: Literal["", "models", "clusters", "ablations"] = "") -> list[str]:
    """Names of the shipped recipes, model presets, clusters or ablations."""
    return sorted(path.stem for path in (shipped_folder() / kind).glob("*.yaml"))


def find(name: str | Path, kind: Literal["", "models", "clusters"], beside: Path | None = None) -> Path:
    """A file by path, or by name: `KIND/NAME.yaml` beside the recipe, then among the shipped ones. A run directory stands for its recipe,
    and a folder of Hugging Face for its config.json where a model is meant."""
    given = Path(os.path.expanduser(name))
    if kind == "models" and os.path.isfile(given / "config.json"):
        return given / "config.json"
    candidates = [beside / kind / f"{name}.yaml"] if beside else []
    for path in [given, *candidates, shipped_folder() / kind / f"{name}.yaml"]:
        if os.path.isfile(path):  # which says no of a path that can be none
            return path
    if not kind and os.path.isfile(given / "resolved.json"):
        return given / "resolved.json"  # a run: the recipe as it was resolved
    if not kind and str(name) in shipped("models"):
        raise UserError(
            f"{name} is a model preset, and a recipe has data and phases besides: write model: {{preset: {name}}} into one, or try "
            f"dense-125m --set model.preset={name}"
        )
    what = {"": "recipe", "models": "model preset", "clusters": "cluster"}[kind]
    close = nearest(given.name.removesuffix(".yaml"), shipped(kind))
    hint = f"did you mean {close}?" if close else f"lmworks ships: {', '.join(shipped(kind))}"
    raise UserError(f"there is no {what} {str(name)!r}, as a file or by name; {hint}")


def load_recipe(path: str | Path, overrides: Sequence[str] = (), size: str | None = None, corpus_only: bool = False) -> Resolved:
    """Load, complete and check a recipe.

    `path` is a YAML (or resolved JSON) file, or the name of a shipped recipe; `overrides` are `a.b=c` with list items by
    name or index and values in YAML; `size` is the one dial, which overrules the file's shape, budgets and rates. With `corpus_only`
    the recipe may do without a model.
    Raises `UserError` of one line with file and line.
    """
    path = _from_here(find(path, ""))
    urls.load(path.parent)  # beside the recipe.yaml of a run
    document = parse_file(path)
    if (path.parent / "resolved.json").is_file():  # a run, perhaps of an earlier version
        document = translated_document(document)
    return _resolve(_Source(path, path.read_text(encoding="utf-8", errors="replace"), document, overrides, size, corpus_only), {})


def load_recipe_text(text: str, overrides: Sequence[str] = (), size: str | None = None, corpus_only: bool = False) -> Resolved:
    """As `load_recipe`, of the text of a recipe; relative paths in it begin at the working directory."""
    return _resolve(_Source(_TEXT, text, parse(text, str(_TEXT)), overrides, size, corpus_only), {})


def _resolve(source: _Source, numbers: Numbers) -> Resolved:
    path, document, size = source.path, source.document, source.size
    tree = copy.deepcopy(document.tree)
    _spell_out(tree)
    replaced: dict[Keys, str] = {}
    if size is not None:
        _override(tree, replaced, f"size={size}", "--size")
    # Names of list items are looked up as they stand, so overrides go in one by one.
    for text in source.overrides:
        _override(tree, replaced, text, "--set")
    urls.refuse_conflicting(tree)
    if path.name != "resolved.json":  # a run of earlier stays readable
        _refuse_secrets(tree, document)
    preset = _preset(tree, document, path.parent)
    sources = _Places(document, replaced, preset)
    refuse_unknown(tree, Recipe, sources.place)
    reasons: derive.Reasons = {}
    for keys, (value, _) in numbers.items():
        if get(tree, keys[:-1]) is not None:  # what the dial derives may not be there yet
            put(tree, keys, value)
    try:
        reasons |= weights.take_model_from_weights(tree)
        if tree.get("size") is not None:
            reasons |= derive.derive_from_size(tree, free=("size",) in replaced)
            for keys, text in replaced.items():
                put(tree, keys, parse_value(text.partition("=")[2], "--set"))
                reasons.pop(keys, None)
        for keys, (value, why) in numbers.items():
            put(tree, keys, value)
            reasons[keys] = why
        recipe = Recipe.model_validate(tree)
        recipe, more = derive.derive_missing(recipe, path.parent, source.corpus_only, reasons)
        reasons |= more
    except ValidationError as error:
        raise UserError(_explain(error, tree, sources)) from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    for keys, message in problems(recipe):
        raise UserError(f"{sources.place(keys)}: {display(tree, keys)}: {message}")
    return Resolved(recipe, fingerprint(recipe), path, _masked(document, source.text), source, partial(sources.origin, reasons=reasons))


def _refuse_secrets(tree: dict[str, Any], document: Document) -> None:
    """Raise `UserError` for a key or token in a value, without showing it."""
    for keys, value in leaves(tree):
        texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
        if holds_secret(mask(" ".join(texts))):  # the words of a command belong together; those of URLs are kept apart
            place = document.place(keys) if get(document.tree, keys) == value else "--set"
            raise UserError(
                f"{place}: {display(tree, keys)} holds a key, a token or a password, and a recipe is stored and printed; export it in the "
                "shell that starts the run, and let what needs it read the environment"
            )


def _masked(document: Document, text: str) -> str:
    """The text of a recipe without credentials; written anew where they cannot be taken out of it as it stands."""
    masked, wanted = mask(text), urls.hide(document.tree)
    if masked == text and wanted == document.tree:
        return text
    try:
        same = parse(masked, document.path).tree == wanted
    except UserError:
        same = False
    return masked if same else yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True)


def load_resolved(path: Path) -> Recipe:
    """The recipe of a `resolved.json`, also of an earlier version, which needs no preset and derives nothing."""
    if (tree := tree_of_json(read_text(path, regular=True))) is not None:
        urls.load(path.parent)
        try:
            return Recipe.model_validate(translated(tree))
        except (UserError, ValidationError):
            pass  # which is told below, with the line
    document = translated_document(parse_file(path))
    urls.load(path.parent)
    try:
        return Recipe.model_validate(document.tree)
    except ValidationError as error:
        raise UserError(_explain(error, document.tree, _Places(document, {}, None))) from None


def load_cluster(name: str | Path, beside: Path | None = None) -> Cluster:
    """A cluster by file or by name, or by number and name of GPUs (`4xrtx4090`), of which at most 8 are in one machine."""
    try:
        path = _from_here(find(name, "clusters", beside))
    except UserError as error:
        return _cluster_of_gpus(str(name), error)
    document = parse_file(path)
    document.tree.setdefault("name", path.stem)
    return as_node(document, Cluster)


def _cluster_of_gpus(name: str, no_file: UserError) -> Cluster:
    try:
        count, gpu = devices.parse_gpus(name, "--cluster")
    except UserError:
        raise UserError(f"{no_file}; or a number of GPUs such as 4xrtx4090, of: {', '.join(devices.GPUS)}") from None
    most = devices.LARGEST_NODE
    if count > most and count % most:
        raise UserError(f"--cluster {name}: more than {most} GPUs are machines of {most}; take {-(-count // most) * most}x{gpu.name}")
    return Cluster.of_gpus(count, gpu)


def as_node(document: Document, node: type[N]) -> N:
    """A parsed file as a node. Raises `UserError` with file and line for unknown keys and invalid values."""
    places = _Places(document, {}, None)
    refuse_unknown(document.tree, node, places.place)
    try:
        return node.model_validate(document.tree)
    except ValidationError as error:
        raise UserError(_explain(error, document.tree, places)) from None


def _from_here(path: Path) -> Path:
    """The path relative to the working directory where it lies below it: shorter to read."""
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path


def _override(tree: dict[str, Any], replaced: dict[Keys, str], text: str, option: str) -> None:
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name or ".." in f".{name}.":
        raise UserError(f"{option} {text!r} is not of the form a.b=c")
    keys = locate(tree, name)
    put(tree, keys, parse_value(value, f"{option} {name}"))
    _spell_out(tree)
    replaced[keys] = text


def _spell_out(tree: dict[str, Any]) -> None:
    """`layout: auto` as a map, below which more can be set."""
    if tree.get("layout") == "auto":
        tree["layout"] = {"auto": True}


def _preset(tree: dict[str, Any], document: Document, beside: Path) -> Document | None:
    """Lay the named model preset under the tree's model."""
    model = tree.get("model")
    name = model.get("preset") if isinstance(model, dict) else None
    if not isinstance(name, str):
        return None
    preset = parse_file(_from_here(find(name, "models", beside)))
    if "architectures" in preset.tree or "model_type" in preset.tree:
        preset = _published(preset)
    refuse_unknown(preset.tree, Recipe.model_fields["model"].annotation, preset.place)
    tree["model"] = merge(model, preset.tree)
    return preset


def _published(config: Document) -> Document:
    """A config.json of Hugging Face as a preset."""
    try:
        model = from_config(config.tree)
    except UserError as error:
        raise UserError(f"{config.path}: {error}") from None
    tree = json.loads(model.model_dump_json(exclude_unset=True, exclude_none=True))
    return Document(config.path, tree, {keys[:stop]: 1 for keys, _ in leaves(tree) for stop in range(1, len(keys) + 1)})


class _Places:
    """Where each key was written: on the command line, in the recipe, or in the preset."""

    def __init__(self, document: Document, replaced: dict[Keys, str], preset: Document | None) -> None:
        self._document, self._replaced, self._preset = document, replaced, preset

    def _find(self, keys: Keys) -> Origin | None:
        for stop in range(len(keys), 0, -1):
            if keys[:stop] in self._replaced:
                text = self._replaced[keys[:stop]]
                return Origin("override", f"--size {text[5:]}" if text.startswith("size=") else f"--set {mask(text)}")
        written = _covers(self._document, keys)
        if written:
            return Origin("recipe", self._document.place(keys))
        if self._preset and keys[0] == "model" and _covers(self._preset, keys[1:]):
            return Origin("preset", Path(self._preset.path).stem)
        return None

    def origin(self, keys: Keys, reasons: derive.Reasons) -> Origin:
        for stop in range(len(keys), 0, -1):
            if keys[:stop] in reasons:
                return Origin("derived", reasons[keys[:stop]])
        return self._find(keys) or Origin("default")

    def place(self, keys: Keys) -> str:
        """What to point at when something is wrong with `keys`: the option, or FILE:LINE."""
        for stop in range(len(keys), 0, -1):
            if keys[:stop] in self._replaced:
                return f"--set {self._replaced[keys[:stop]]}"
        if self._preset and keys and keys[0] == "model" and keys not in self._document.lines and keys[1:] in self._preset.lines:
            return self._preset.place(keys[1:])
        return self._document.place(keys)


def _covers(document: Document, keys: Keys) -> bool:
    """Whether the file states the value at `keys`, itself or as part of a plain list; a null map does not count."""
    return keys in document.lines or (bool(keys) and isinstance(get(document.tree, keys[:-1]), list) and keys[:-1] in document.lines)


def _explain(error: ValidationError, tree: dict[str, Any], places: _Places) -> str:
    """The first faults of a validation as one line."""
    found = list(_faults(error, tree, places))
    return found[0] + (f" (and {len(found) - 1} more like it)" if len(found) > 1 else "")


def _faults(error: ValidationError, tree: dict[str, Any], places: _Places) -> Iterator[str]:
    for item in error.errors():
        keys = _written(tree, item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        value = item.get("input")
        if item["type"] not in ("missing", "value_error") and isinstance(value, (str, int, float, bool, type(None))):
            message = f"{message[0].lower()}{message[1:]}, not {value!r}"
        elif item["type"] == "missing":
            message = "is missing and has no default"
        elif item["type"] == "dict_type" and isinstance(value, list):
            message = "should be a map of keys ({KEY: VALUE, ...}), not a list"
        path = display(tree, keys)
        yield f"{places.place(keys)}: {path + ': ' if path else ''}{message}"


def _written(tree: Any, keys: Keys) -> Keys:
    """`keys` as they stand in the file: pydantic puts the value of `step` among them where it chose a node by it."""
    found: list[str | int] = []
    for key in keys:
        if isinstance(tree, dict) and key not in tree and tree.get("step") == key:
            continue
        found.append(key)
        tree = get(tree, (key,))
    return tuple(found)
