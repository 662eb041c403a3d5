"""config.json of a Hugging Face class, from our model and back; which classes there are, the registry of families says."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.recipe.families import common
from lmworks.recipe.families.registry import family_in, family_of
from lmworks.recipe.schema.model import Model, Rope


def class_for(model: Model) -> str:
    """The class whose mathematics is this model's; `NoClass` with the reason if there is none."""
    return family_of(model).name


def to_config(model: Model, rope: Rope, tokens: dict[str, Any]) -> dict[str, Any]:
    """config.json. `rope` is that of the last phase; `tokens` holds eos_token_id and pad_token_id."""
    family = family_of(model)
    return common.to_config(family, model, rope) | tokens | family.to_config(model, rope)


def from_config(config: dict[str, Any]) -> Model:
    """Our model from a config.json of one of the families; `UserError` for what they have and we have not."""
    try:
        return Model.model_validate(common.from_config(family_in(config), config))
    except UserError:
        raise
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"config.json describes no model that lmworks has: {reason}") from None
    except (AttributeError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"config.json has a value of the wrong kind ({error}); lmworks cannot read it") from None
