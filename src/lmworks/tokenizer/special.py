"""The special tokens, after GLM-4.x, and the pattern that splits text before byte-pair merging."""

from __future__ import annotations

END = "<|endoftext|>"
SYSTEM, USER, ASSISTANT, OBSERVATION = "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"
CODE_PREFIX, CODE_MIDDLE, CODE_SUFFIX = "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"
NO_THINKING = "/nothink"

# Markup for tool and reasoning parsers. `tokenizers` treats it as added but not special, so that decoding with skip_special_tokens
# keeps it.
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
          "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

# GLM-4.5's own names in the order of its ids, which begin at 151329.
GLM = (END, "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", SYSTEM, USER, ASSISTANT, OBSERVATION,
       *(f"<|{edge}_of_{kind}|>" for kind in ("image", "video", "audio", "transcription") for edge in ("begin", "end")),
       CODE_PREFIX, CODE_MIDDLE, CODE_SUFFIX, NO_THINKING, *MARKUP, "<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>")

# Names that GLM-4.x has no token for. lmworks does not use them; they are in the vocabulary for runs that need them.
MORE = ("<|developer|>", "<|context|>", "<|critic|>",  # roles
        "<|tool_plan|>", "<|tool_error|>", "<|code_interpreter|>", "<|begin_of_citation|>", "<|end_of_citation|>",  # function calling
        "<|repository|>", "<|file|>", "<|code_pad|>", "<|test|>", "<|terminal|>",  # code
        "<|issue|>", "<|comment|>", "<|commit_before|>", "<|commit_message|>", "<|commit_after|>", "<|patch|>",
        "<|notebook_text|>", "<|notebook_code|>", "<|notebook_output|>",
        "<|masked_address|>", "<|masked_email|>", "<|masked_ip|>", "<|masked_key|>", "<|masked_name|>", "<|masked_number|>")

# Chat and document ends need these. An adopted tokenizer gets those that it lacks.
REQUIRED = (END, "[gMASK]", "<sop>", SYSTEM, USER, ASSISTANT, OBSERVATION)

# Each of these ends the assistant's turn. The model ends its turn by generating the next role token, as in GLM-4.x.
STOPS = (END, USER, OBSERVATION)

# The only special token that a user may type, as in GLM-4.x: it does not change the role.
OPEN = (NO_THINKING,)

# The exact pattern of cl100k and GLM-4, which llama.cpp's pre-tokenizer "glm4" implements.
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# The same with single digits, as in SentencePiece tokenizers like Llama 2's.
SPLIT_DIGITS = SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def reserved(number: int) -> str:
    """The name of an unused special token."""
    return f"<|reserved_{number}|>"


def names(count: int) -> list[str]:
    """The first `count` special tokens: GLM-4.x's, then ours, then reserved ones."""
    named = (GLM + MORE)[:count]
    return [*named, *(reserved(number) for number in range(count - len(named)))]
