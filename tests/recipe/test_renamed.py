"""Keys that were called otherwise before: an old name is refused with the new one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from lmworks.cli.main import main
from lmworks.errors import UserError
from lmworks.recipe.keys import nodes_of
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.layout import Cluster
from lmworks.recipe.schema.recipe import Recipe


def all_nodes(root: type[BaseModel]) -> Iterator[type[Node]]:
    assert issubclass(root, Node)
    yield root
    for field in root.model_fields.values():
        for node in nodes_of(field.annotation):
            yield from all_nodes(node)


NODES = list(dict.fromkeys([*all_nodes(Recipe), *all_nodes(Cluster)]))
RENAMED = [(node, old, new) for node in NODES for old, new in node.renamed.items()]


def test_every_new_name_is_a_key_and_no_old_name_is() -> None:
    assert len(RENAMED) > 50
    wrong = [(node.__name__, old, new) for node, old, new in RENAMED if new not in node.model_fields or old in node.model_fields]
    assert not wrong, "a key that is there cannot have been renamed, and its new name must be there"


def test_no_two_old_names_became_one_key() -> None:
    for node in NODES:
        assert len(set(node.renamed.values())) == len(node.renamed), node.__name__


@pytest.mark.parametrize(
    ("override", "path", "new"),
    [
        ("model.layers=3", "model", "num_hidden_layers"),
        ("optimizer.clip=1", "optimizer", "max_grad_norm"),
        ("train.phases.general.batch=8Ki tokens", "train.phases.general", "global_batch_size"),
        ("corpus.sources.speeches.licence=MIT", "corpus.sources.speeches", "license"),
        ("corpus.steps=[{step: code, seconds: 5 s}]", "corpus.steps.code", "timeout"),
    ],
)
def test_an_old_name_is_refused_with_the_new_one(override: str, path: str, new: str) -> None:
    old = override.partition("=")[0].rpartition(".")[2] if "[" not in override else "seconds"
    with pytest.raises(UserError, match=rf"{path} has no key '{old}' any more; it is called '{new}' now$") as error:
        load_recipe("quickstart", [override])
    assert "\n" not in str(error.value)


def test_the_command_ends_with_one_line_that_names_the_new_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lmworks", "show", "quickstart", "--set", "optimizer.clip=1"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    assert "optimizer has no key 'clip' any more; it is called 'max_grad_norm' now" in said.err
