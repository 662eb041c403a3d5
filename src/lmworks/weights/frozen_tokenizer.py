"""The tokenizer is frozen once there is a checkpoint: with another tokenizer, every token id would have another meaning."""

from __future__ import annotations

from pathlib import Path

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.io.files import sha256_file

META = "tokenizer"  # under this key a checkpoint's meta has the hash of the tokenizer.json that its weights were trained with
_FILE = Path("tokenizer") / "tokenizer.json"


def weights_of(run_dir: Path) -> str | None:
    """Hex SHA-256 of the tokenizer.json that the newest readable checkpoint of a run was trained with; empty where none of them says it,
    None where nothing has been saved yet."""
    place = run_dir / "checkpoints"
    if not listing.has_checkpoints(place):
        return None
    for path in reversed(listing.directories(place)):
        try:
            return str(listing.read_meta(path)["meta"].get(META, ""))
        except (OSError, ValueError, KeyError, AttributeError):
            continue
    return ""


def digest(run_dir: Path) -> str:
    """Hex SHA-256 of the run's tokenizer.json; `UserError` if there is none."""
    path = run_dir / _FILE
    if not path.is_file():
        raise UserError(f"{path} does not exist; make it with `lmworks tokenizer train RECIPE`")
    return sha256_file(path)


def require_same(run_dir: Path, trained: str | None) -> None:
    """Raise `UserError` if the run has a tokenizer that is not the one with this hash, which weights were trained with."""
    if (run_dir / _FILE).is_file():
        require_same_file(run_dir / _FILE, trained)


def require_same_file(path: Path, trained: str | None) -> None:
    """Raise `UserError` if a tokenizer.json is not the one with this hash, which weights were trained with."""
    if trained and sha256_file(path) != trained:
        raise UserError(
            f"{path} is not the tokenizer that the weights of this run were trained with ({trained[:12]}); put that one back, "
            "which an export of the run holds too, or choose another run_dir"
        )
