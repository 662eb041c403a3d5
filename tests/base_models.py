"""Base models as others publish them, tiny: tokenizers and chat templates of four kinds, and models of transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXT = (
    "The user asks, and the assistant answers: what is 1 + 2? It is 3. What is the capital of France? It is Paris.\n"
    "def add(a, b):\n    return a + b\n\nOne, two, three; 10, 20, 30. <think> </think> look here naïve café 東京 \n\n"
) * 8

GLM = """[gMASK]<sop>
{%- set at = namespace(user=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set at.user = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{ '<|user|>\\n' + m.content }}
{%- elif m.role == 'system' -%}
{{ '<|system|>\\n' + m.content }}
{%- elif m.role == 'assistant' -%}
{%- set thoughts = m.reasoning_content if loop.index0 > at.user and m.reasoning_content else '' -%}
{{ '<|assistant|>\\n<think>' + thoughts.strip() + '</think>' + ('\\n' + m.content.strip() if m.content else '') }}
{%- for call in m.tool_calls or [] -%}
{{ '\\n<tool_call>' + call.function.name + '\\n' }}{{ call.function.arguments | tojson }}{{ '\\n</tool_call>' }}
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{{ '<|observation|>\\n' + m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|assistant|>' }}{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif -%}
"""

QWEN = """{%- set ns = namespace(last=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}
{{ '<think>\\n' + (m.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{ '\\n<tool_call>\\n' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '' }}
{%- endif -%}
"""

LLAMA = """{{- bos_token }}
{%- for m in messages %}
{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls %}
{{- '<|python_tag|>' }}{{ {'name': m.tool_calls[0].function.name, 'parameters': m.tool_calls[0].function.arguments} | tojson }}
{{- '<|eom_id|>' }}
{%- else %}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{{- bos_token -}}
{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- set rest = messages[1:] if first else messages -%}
{%- for m in rest -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) and not tools and m.role in ['user', 'assistant'] and not m.tool_calls -%}
{{- raise_exception('roles must alternate user and assistant') -}}
{%- endif -%}
{%- if m.role == 'user' -%}
{{- '[INST] ' + (first if loop.first else '') + m.content + '[/INST]' -}}
{%- elif m.tool_calls -%}
{{- '[TOOL_CALLS] ' -}}{{- m.tool_calls | map(attribute='function') | list | tojson -}}{{- eos_token -}}
{%- elif m.role == 'assistant' -%}
{{- ' ' + m.content | trim + eos_token -}}
{%- elif m.role == 'tool' -%}
{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' -}}
{%- else -%}
{{- raise_exception('only user, assistant and tool') -}}
{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer: its special tokens (text, whether decoding skips them), its template, and what generation_config.json says."""

    template: str
    special: tuple[str, ...]
    markup: tuple[str, ...] = ()
    bos: str | None = None
    eos: str = ""
    eos_ids: tuple[str, ...] = ()
    spaces: str | None = None  # of SentencePiece: `prepend_scheme`
    digits: str = r"\p{N}{1,3}"


KINDS = {
    "glm": Kind(GLM, ("<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
                ("<think>", "</think>", "<tool_call>", "</tool_call>"), None, "<|endoftext|>",
                ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "qwen": Kind(QWEN, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
                 ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"), None, "<|endoftext|>",
                 ("<|endoftext|>",), digits=r"\p{N}"),
    "llama": Kind(LLAMA, ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
                          "<|python_tag|>"), (), "<|begin_of_text|>", "<|end_of_text|>", ("<|end_of_text|>",)),
    "mistral": Kind(MISTRAL, ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), (),
                    "<s>", "</s>", ("</s>",), spaces="first"),
}  # fmt: skip


def write_tokenizer(folder: Path, name: str, vocab_size: int = 400) -> Kind:
    """Train a tokenizer of a kind on a little text, and write its files into `folder`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    kind = KINDS[name]
    added = [AddedToken(text, special=text in kind.special, normalized=False) for text in (*kind.special, *kind.markup)]
    if kind.spaces is not None:
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always", split=True)
        trainer = trainers.BpeTrainer(vocab_size=max(vocab_size, 256 + 160), special_tokens=[*kind.special, *bytes_], show_progress=False)
        tokenizer.train_from_iterator([TEXT], trainer)
        spec = json.loads(tokenizer.to_str())
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in kind.special]
        spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": kind.spaces, "split": False}
        tokenizer = Tokenizer.from_str(json.dumps(spec))
        space = decoders.Replace("\u2581", " ")
        tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + kind.digits
        split += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC() if name == "qwen" else None
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size - len(added), initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator([TEXT], trainer)
        tokenizer.add_tokens(added)
        tokenizer.decoder = decoders.ByteLevel()
    if kind.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{kind.bos} $A", special_tokens=[(kind.bos, tokenizer.token_to_id(kind.bos))])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": kind.eos, "clean_up_tokenization_spaces": False}
    config |= {"bos_token": kind.bos} if kind.bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(kind.template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id(text) for text in kind.eos_ids]}))
    return kind


def write_model(folder: Path, vocab_size: int, seed: int = 3, **changes: Any) -> None:
    """A Llama of transformers with random weights."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{
        "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "rms_norm_eps": 1e-6} | changes)
    generation = folder / "generation_config.json"
    kept = generation.read_text() if generation.is_file() else None
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    if kept is not None:
        generation.write_text(kept)
