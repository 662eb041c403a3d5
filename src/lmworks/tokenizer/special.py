"""The special tokens, after GLM-4.x, and the rule that cuts text into pieces before byte-pair merging."""

from __future__ import annotations

END = "<|endoftext|>"
SYSTEM, USER, ASSISTANT, OBSERVATION = "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"

# Markup that readers of the text (tool and reasoning parsers) look for. `tokenizers` calls it added but not special, so that decoding
# with skip_special_tokens keeps it.
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
          "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

SPECIAL = (END, "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", SYSTEM, USER, ASSISTANT, OBSERVATION, *MARKUP,
           "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>")

# Without these there is no chat and no end; a tokenizer that lacks one is refused.
REQUIRED = (END, "[gMASK]", "<sop>", SYSTEM, USER, ASSISTANT, OBSERVATION)

# Any of these ends the assistant's turn. The role that speaks next is the model's way of falling silent, as in GLM-4.x.
STOPS = (END, USER, OBSERVATION)

# The split of cl100k and GLM-4, letter for letter: llama.cpp's pre-tokenizer "glm4" implements this one.
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def reserved(number: int) -> str:
    """The name of an unused special token."""
    return f"<|reserved_{number}|>"
