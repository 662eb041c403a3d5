"""The model in a GGUF file: its metadata as our model and back, and the file as a Hugging Face folder. No weights are read here.

The metadata are the keys below the name of the architecture. What is written is declared once (`metadata_of`, and the architecture of each
family). What is read becomes a model, and what that model would be written as is compared with the file, key by key: a key that means
something else, or that lmworks does not know, is refused.

The folder (`as_folder`) has config.json and the files of the tokenizer, made from the metadata, and links to the file itself. It is in the
cache, under a name made from path, size and time of the file, and takes a few megabytes. Whatever reads a folder in Hugging Face's format
reads it too; `lmworks.weights` dequantizes the tensors as they are read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.io.files import cache_directory, explain_os_errors, temporary_folder
from lmworks.recipe.families.common import slides_of_pattern
from lmworks.recipe.families.family import NoClass
from lmworks.recipe.families.registry import FAMILIES, family_of, to_config, why_beyond
from lmworks.recipe.families.rope import rope_parameters
from lmworks.recipe.gguf_header import TYPES, Header, files_of_model, is_gguf, read_header
from lmworks.recipe.gguf_tokenizer import files_of_tokenizer
from lmworks.recipe.schema.model import Model

_GATES = {"SOFTMAX": 1, "SIGMOID": 2}  # llama.cpp's numbers
_BELOW = {  # keys of a family's metadata that are not directly below the architecture
    "head_count_kv": "attention", "key_length": "attention", "value_length": "attention", "key_length_mla": "attention",
    "value_length_mla": "attention", "kv_lora_rank": "attention", "q_lora_rank": "attention",
    "sliding_window": "attention", "sliding_window_pattern": "attention", "freq_base_swa": "rope",
    "recurrent_layers": "attention", "dimension_sections": "rope", "scale": "attention",
    **dict.fromkeys(("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count"), "ssm"),
}  # fmt: skip
_DOTTED = {
    "rope_dimension_count": "rope.dimension_count", "rope_scaling_finetuned": "rope.scaling.finetuned",
    "layer_norm_eps": "attention.layer_norm_epsilon", "shortconv_l_cache": "shortconv.l_cache",
}  # fmt: skip
_EPSILON, _OTHER_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"  # the latter alone in files of Nemotron-H
_SAYS_NOTHING = ("rope.scaling.finetuned", "tensor_data_layout")
_ABSENT = {
    "rope.freq_base": 10_000.0, "rope.freq_base_swa": 10_000.0, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
    "leading_dense_block_count": 0, "nextn_predict_layers": 0, "expert_group_count": 1, "expert_group_used_count": 1,
    "expert_weights_norm": False, "expert_weights_scale": 1.0,
}  # fmt: skip
"""What llama.cpp computes where a file lacks a key. Other keys it requires, takes from tensors, or ignores."""
_ROPE_FACTORS, _PATTERN = "rope_freqs.weight", "attention.sliding_window_pattern"


def metadata_of(model: Model) -> dict[str, Any]:
    """The keys below the architecture, for a model whose RoPE is that of its last phase. Raises `NoClass` if llama.cpp lacks it."""
    family = family_of(model)
    assert model.head_dim
    found: dict[str, Any] = {
        "block_count": model.num_hidden_layers, "context_length": int(model.max_position_embeddings or 2048),
        "embedding_length": model.hidden_size, "feed_forward_length": model.intermediate_size,
        "attention.head_count": model.num_attention_heads,
    }  # fmt: skip
    if model.mla is None:
        found |= {"attention.head_count_kv": model.num_key_value_heads, "attention.key_length": model.head_dim}
        found |= {"attention.value_length": model.head_dim}
    found |= {"attention.layer_norm_rms_epsilon": model.rms_norm_eps, "vocab_size": model.vocab_size}
    rope = rope_parameters(family, model, model.rope)
    if model.mla is None:
        found["rope.dimension_count"] = int(model.head_dim * model.rope.partial_rotary_factor)
    found["rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found |= {"rope.scaling.yarn_beta_fast": float(rope["beta_fast"]), "rope.scaling.yarn_beta_slow": float(rope["beta_slow"])}
    for key, value in family.gguf(model).metadata.items():
        below = _BELOW.get(key)
        name = _DOTTED.get(key) or (f"{below}.{key}" if below else key)
        found[name] = _GATES[value] if key == "expert_gating_func" else value
    return found


def model_of(header: Header, rope_factors: list[float] | None = None) -> Model:
    """The model that a GGUF file describes. `rope_factors` are the values of the tensor rope_freqs.weight, if it has one.

    Raises `UserError` with the reason if lmworks has no such model.
    """
    architecture = header.metadata.get("general.architecture")
    if header.metadata.get("general.type", "model") != "model":
        raise UserError(f"it is of type {str(header.metadata['general.type'])[:50]!r}, not a model")
    candidates = [family for family in FAMILIES.values() if architecture in family.architectures]
    if not candidates and (why := why_beyond(architecture)) is not None:
        raise UserError(f"its architecture is {str(architecture)!r}, {why}")
    if not candidates:
        known = sorted({name for family in FAMILIES.values() for name in family.architectures})
        raise UserError(f"its architecture is {str(architecture)[:50]!r}; lmworks reads {', '.join(known)}")
    values = _Values(header, str(architecture))
    experts = values.get("expert_count", 0)
    candidates = [one for one in candidates if (one.has("experts") if experts else "experts" not in one.requires)]
    if not candidates:
        many = f"{experts} experts ({architecture}.expert_count)"
        raise UserError(f"it has {many}, and lmworks knows no such model of architecture {architecture}")
    _refuse_absurd(values, header)
    common = _common(values, header, rope_factors)
    reasons: list[str] = []
    for family in candidates:
        try:
            model = Model.model_validate(common | family.from_gguf(values))
            written = metadata_of(model)
            if (one := family_of(model)) is not family:
                reasons.append(f"it would be a {one.name}")
            elif (other := family.gguf(model).architecture) != architecture:
                reasons.append(f"lmworks knows this model as architecture {other}")
            else:
                values.refuse_other(written, model)
                return model
        except NoClass as error:
            reasons.append(error.reason)
        except ValidationError as error:
            reasons.append(error.errors()[0]["msg"].removeprefix("Value error, "))
    raise UserError(f"it is no model of architecture {architecture} that lmworks has: {'; '.join(dict.fromkeys(reasons))}")


class _Values(Mapping[str, Any]):
    """The keys of a file below its architecture. A value that is missing is refused by its name."""

    def __init__(self, header: Header, architecture: str) -> None:
        self.architecture, prefix = architecture, f"{architecture}."
        self._found = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
        for key, value in self._found.items():
            if isinstance(value, float):
                self._found[key] = _shortest(value) if math.isfinite(value) else self._refuse(key, value)
            elif isinstance(value, list) and len(set(map(str, value))) == 1:
                self._found[key] = value[0]  # one number for each layer, all alike

    def __getitem__(self, key: str) -> Any:
        if key not in self._found:
            raise UserError(f"it has no {self.architecture}.{key}")
        return self._found[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self._found.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def size(self, key: str, default: int | None = None) -> int:
        """A number that is above 0."""
        value = self[key] if default is None else self.get(key, default)
        if type(value) is not int or value <= 0:
            self._refuse(key, value)
        return int(value)

    def _refuse(self, key: str, value: Any) -> Any:
        raise UserError(f"its {self.architecture}.{key} is {str(value)[:60]}, which lmworks cannot read")

    def refuse_other(self, written: Mapping[str, Any], model: Model) -> None:
        """Raise `UserError` for a key that says something else than `written`, as which `model` is written, or something unknown."""
        for key, value in self._found.items():
            if key == _PATTERN:
                layers = model.num_hidden_layers or 0
                if slides_of_pattern(value, layers) != [model.slides(layer) for layer in range(layers)]:
                    self._refuse(key, value)
            elif key == "rope.dimension_count" and not model.rope.partial_rotary_factor:
                continue  # of no positions
            elif key in written:
                numbers = isinstance(value, (int, float)) and isinstance(written[key], (int, float))
                same = numbers and math.isclose(value, written[key], rel_tol=1e-6)
                if not same and value != written[key]:
                    self._refuse(key, value)
            elif key not in _SAYS_NOTHING and value not in (0, False, "none", "") and not self._harmless(key, value, written):
                raise UserError(f"it has {self.architecture}.{key} = {str(value)[:60]}, which lmworks does not know")
        for key, default in self._absent(model).items():
            if key in written and key not in self._found and written[key] != default:
                raise UserError(
                    f"it has no {self.architecture}.{key}, without which llama.cpp takes {default}, and this model has {written[key]} in "
                    "lmworks; convert the original model again"
                )

    def _absent(self, model: Model) -> dict[str, Any]:
        """What llama.cpp takes for keys that a file lacks."""
        found = dict(_ABSENT)
        if self.architecture in ("mellum", "olmo2"):
            found["rope.freq_base_swa"] = model.rope.theta
        if self.architecture == "glm4moe":
            found["expert_gating_func"] = _GATES["SIGMOID"]
        if self.architecture == "deepseek2":  # DeepSeek-V2, but for GLM-4.7-Flash, which it knows by its sizes
            flash = model.num_hidden_layers in (47, 48) and model.vocab_size == 154_880
            found["expert_gating_func"] = _GATES["SIGMOID" if flash else "SOFTMAX"]
        return found

    def _harmless(self, key: str, value: Any, written: Mapping[str, Any]) -> bool:
        if key == "attention.sliding_window":
            return isinstance(value, int) and value >= written["context_length"]
        if key == "rope.scaling.original_context_length":  # without a scaling that it belongs to
            return "rope.scaling.type" not in written
        if key == "rope.scaling.attn_factor":
            return bool(value == 1)
        return key == "attention.causal" and value is True


def _refuse_absurd(values: _Values, header: Header) -> None:
    """Numbers by which memory is allocated must not exceed what the file has."""
    if values.size("block_count") > len(header.tensors):
        raise UserError(f"its {values.architecture}.block_count is {values['block_count']:,}, but it has {len(header.tensors):,} tensors")
    if values.get("expert_count", 0) and values.get("leading_dense_block_count", 0) < values["block_count"]:
        most = max((tensor.shape[0] for tensor in header.tensors.values() if len(tensor.shape) == 3), default=0)
        if values.size("expert_count") > most:
            raise UserError(f"its {values.architecture}.expert_count is {values['expert_count']:,}, but no tensor has as many experts")


def _common(values: _Values, header: Header, rope_factors: list[float] | None) -> dict[str, Any]:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError("it has no embedding (token_embd.weight)")
    heads, width = values.size("attention.head_count"), values.size("embedding_length")
    head_dim = values.size("attention.key_length", width // heads or 1)
    rotated = values.size("rope.dimension_count", head_dim)
    kv_heads = values.get("attention.head_count_kv")
    if isinstance(kv_heads, list) and all(type(one) is int for one in kv_heads):  # for each layer: 0 where there is no attention
        kv_heads = max(kv_heads, default=0)
    else:
        kv_heads = values.size("attention.head_count_kv", heads)
    fraction = 1.0 if "attention.kv_lora_rank" in values else rotated / head_dim  # latent attention has a part of its own that is rotated
    return {
        "vocab_size": embedding.shape[0], "hidden_size": width, "num_hidden_layers": values.size("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "intermediate_size": _width(values),
        "rms_norm_eps": values[_EPSILON if _EPSILON in values or _OTHER_EPSILON not in values else _OTHER_EPSILON],
        "max_position_embeddings": f"{values.size('context_length')} tokens", "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors, "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "rope": _rope(values, fraction, rotated, rope_factors),
    }  # fmt: skip


def _width(values: _Values) -> int:
    """The width of feed-forward blocks; of a list with one for each layer the largest, since layers without such a block have 0."""
    widths = values.get("feed_forward_length")
    if isinstance(widths, list) and all(type(one) is int for one in widths) and max(widths, default=0) > 0:
        return max(widths)
    return values.size("feed_forward_length", values.get("expert_feed_forward_length"))


def _rope(values: _Values, fraction: float, rotated: int, factors: list[float] | None) -> dict[str, Any]:
    theta = values.get("rope.freq_base", 10_000.0)
    rope: dict[str, Any] = {"theta": theta, "partial_rotary_factor": fraction}
    kind, old = values.get("rope.scaling.type", "none"), values.get("rope.scale_linear", 0.0)
    if factors is not None:
        if kind not in ("none", "llama3"):
            raise UserError(f"it has both {_ROPE_FACTORS} and {values.architecture}.rope.scaling.type {str(kind)[:20]}")
        return rope | _llama3(factors, theta, rotated)
    if kind == "none" or (kind == "linear" and values.get("rope.scaling.factor", old or 1.0) == 1):
        return rope
    if kind == "linear":
        return rope | {"scaling": "linear", "factor": values.get("rope.scaling.factor", old)}
    if kind == "yarn":
        return rope | {
            "scaling": "yarn", "factor": values["rope.scaling.factor"],
            "original_max_position_embeddings": f"{values.size('rope.scaling.original_context_length')} tokens",
            "beta_fast": values.get("rope.scaling.yarn_beta_fast", 32.0), "beta_slow": values.get("rope.scaling.yarn_beta_slow", 1.0),
        }  # fmt: skip
    raise UserError(f"its {values.architecture}.rope.scaling.type is {str(kind)[:20]}, which lmworks does not have")


def _llama3(factors: list[float], theta: float, rotated: int) -> dict[str, Any]:
    """The llama3 scaling whose factors these are: llama.cpp stores the divisor of each frequency and not where they come from.

    Between the frequencies that are kept (1) and those that are divided by `factor`, 1 / divisor is a straight line in the rotations that
    a frequency makes in the original context. That context and both limits have a common scale, so any context does, with limits for it.
    Where fewer than two frequencies lie on the line, any line that leaves the others kept or divided is the same scaling. Whoever reads the
    weights compares the factors of the result with those of the file.
    """
    if len(factors) != rotated // 2 or not all(math.isfinite(one) and one >= 1 for one in factors):
        raise UserError(f"its {_ROPE_FACTORS} are not those of the scaling of Llama 3")
    if (factor := _shortest(max(factors))) == 1:
        return {}
    turns = [theta ** (-2 * number / rotated) / (2 * math.pi) for number in range(rotated // 2)]  # per token
    kept = [(1 / one - 1 / factor) / (1 - 1 / factor) for one in factors]
    points = list(zip(turns, kept, strict=True))
    line = [(turn, share) for turn, share in points if 1e-6 < share < 1 - 1e-6]
    whole, none = [turn for turn, share in points if share >= 1 - 1e-6], [turn for turn, share in points if share <= 1e-6]
    if len(line) < 2:
        fast, slow = min(whole, default=2 * turns[0]), max(none, default=turns[-1] / 2)
        turn, share = line[0] if line else ((fast + slow) / 2, 0.5)
        # steeper than through a neighbour, which fp32 would move onto the line
        slope = 1.001 * max((1 - share) / (fast - turn), share / (turn - slow)) if fast > turn > slow else -1.0
    else:
        turn, share = line[0]
        slope = (share - line[-1][1]) / (turn - line[-1][0])
    if not slope > 0 or not (offset := share - slope * turn) < 0:
        raise UserError(f"its {_ROPE_FACTORS} are not those of the scaling of Llama 3")
    context = 8192  # of the published models, whose limits are then 1 and 4
    digits = 6 if len(line) > 1 else 12  # as many as the factors say, in fp32
    low, high = (float(f"{limit * context / slope:.{digits}g}") for limit in (-offset, 1 - offset))
    scaling = {"scaling": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    return scaling | {"original_max_position_embeddings": f"{context} tokens"}


def _shortest(value: float) -> float:
    """The decimal number with the fewest digits that is stored as this fp32 value."""
    bits = struct.pack("<f", value)
    return next((number for digits in range(1, 10) if struct.pack("<f", number := float(f"{value:.{digits}g}")) == bits), value)


_FORMAT = 3  # of what is made here; a change makes the folders again
_DTYPES = {1: "float16", 32: "bfloat16"}  # llama.cpp's general.file_type, for files that are not quantized


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or the only one in a folder without safetensors; None if there is none.

    Raises `UserError` if a folder has several models.
    """
    if not path.is_dir():
        return path if is_gguf(path) else None
    found = sorted(one for one in path.iterdir() if is_gguf(one))
    if not found or any(path.glob("*.safetensors")):
        return None
    models = {files_of_model(one)[0] for one in found}
    if len(models) > 1:
        raise UserError(f"{path} has {len(models)} models ({', '.join(sorted(one.name for one in models))}); name one of the files")
    return models.pop()


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json that `tokenizer.path` names: itself, that in a folder, or that made of a GGUF file."""
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return path / "tokenizer.json"
    if (gguf := find_gguf(path)) is not None:
        return as_folder(gguf) / "tokenizer.json"
    return path / "tokenizer.json" if path.is_dir() else path


def as_folder(path: Path) -> Path:
    """The folder for a GGUF file, made if it is not in the cache. Raises `UserError` naming the file if it is damaged or not supported."""
    files = files_of_model(path)
    if not path.is_file():
        raise UserError(f"{path} {'is not a regular file' if path.exists() else 'does not exist'}; name a GGUF file")
    real = [file.resolve() for file in files]
    states = [file.stat() for file in real]
    key = [_FORMAT, *((str(file), state.st_size, state.st_mtime_ns) for file, state in zip(real, states, strict=True))]
    folder = cache_directory("gguf") / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    if folder.is_dir():
        return folder
    try:
        header = read_header(real[0])
        content = _files(header)
    except UserError as error:
        raise UserError(str(error) if str(path) in str(error) or str(real[0]) in str(error) else f"{path}: {error}") from None
    with explain_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder.parent, ".making-") as aside:
            made = aside / "made"
            made.mkdir()
            for name, text in content.items():
                (made / name).write_text(text, encoding="utf-8")
            for file, link in zip(real, files, strict=True):
                os.symlink(file, made / link.name)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # made by another process meanwhile
                    raise
    return folder


def _files(header: Header) -> dict[str, str]:
    model = model_of(header, _rope_factors(header))
    tokenizer = files_of_tokenizer(header.metadata)
    generation = json.loads(tokenizer["generation_config.json"])
    tokens = {"bos_token_id": generation.get("bos_token_id"), "eos_token_id": generation["eos_token_id"]}
    stored = _DTYPES.get(header.metadata.get("general.file_type", 0), "float32")
    config = to_config(model, model.rope, tokens | {"pad_token_id": generation.get("pad_token_id")}) | {"dtype": stored}
    return {"config.json": json.dumps(config, indent=2) + "\n"} | tokenizer


def _rope_factors(header: Header) -> list[float] | None:
    found = header.tensors.get(_ROPE_FACTORS)
    if found is None:
        return None
    if TYPES[found.type][0] != "F32" or len(found.shape) != 1:
        raise UserError(f"its tensor {_ROPE_FACTORS} is not a list of fp32 numbers")
    with open(found.file, "rb") as file:
        file.seek(found.offset)
        return list(struct.unpack(f"<{found.shape[0]}f", file.read(found.nbytes)))
