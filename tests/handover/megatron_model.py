"""Builds Megatron-Core's GPT model on the CPU from MODEL_ARGS, loads converted weights strictly, and computes hidden states and logits.

Read on stdin, as JSON: {"arguments": {name: value or null}, "weights": safetensors with Megatron's names, "ids": [[...]], "out": file}.
Megatron expects a GPU: what it asks of one is answered here, without a part in the mathematics.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext

import torch

asked = json.load(sys.stdin)
given = asked["arguments"]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(asked["port"]), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
torch.distributed.init_process_group("gloo", rank=0, world_size=1)
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.Stream = torch.cuda.current_stream = lambda *_, **__: None

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
moe_utils.te_general_gemm = None
parallel_state.initialize_model_parallel()

NAMES = {  # argument -> field of TransformerConfig and its type
    "--num-layers": ("num_layers", int), "--hidden-size": ("hidden_size", int), "--ffn-hidden-size": ("ffn_hidden_size", int),
    "--num-attention-heads": ("num_attention_heads", int), "--num-query-groups": ("num_query_groups", int),
    "--kv-channels": ("kv_channels", int), "--norm-epsilon": ("layernorm_epsilon", float), "--normalization": ("normalization", str),
    "--add-qkv-bias": ("add_qkv_bias", bool), "--qk-layernorm": ("qk_layernorm", bool), "--num-experts": ("num_moe_experts", int),
    "--moe-layer-freq": ("moe_layer_freq", eval), "--moe-ffn-hidden-size": ("moe_ffn_hidden_size", int),
    "--moe-router-topk": ("moe_router_topk", int), "--moe-router-score-function": ("moe_router_score_function", str),
    "--moe-router-dtype": ("moe_router_dtype", str), "--moe-router-load-balancing-type": ("moe_router_load_balancing_type", str),
    "--moe-aux-loss-coeff": ("moe_aux_loss_coeff", float),
    "--moe-shared-expert-intermediate-size": ("moe_shared_expert_intermediate_size", int),
    "--moe-router-pre-softmax": ("moe_router_pre_softmax", bool),
    "--moe-router-enable-expert-bias": ("moe_router_enable_expert_bias", bool),
    "--moe-router-bias-update-rate": ("moe_router_bias_update_rate", float),
    "--moe-router-topk-scaling-factor": ("moe_router_topk_scaling_factor", float), "--mtp-num-layers": ("mtp_num_layers", int),
    "--attention-dropout": ("attention_dropout", float), "--hidden-dropout": ("hidden_dropout", float),
    "--attention-softmax-in-fp32": ("attention_softmax_in_fp32", bool),
}  # fmt: skip
ELSEWHERE = {  # arguments of the model itself, and those that choose a faster computation of the same values
    "--vocab-size", "--max-position-embeddings", "--seq-length", "--position-embedding-type", "--rotary-base", "--rotary-percent",
    "--swiglu", "--disable-bias-linear", "--group-query-attention", "--untie-embeddings-and-output-weights",
    "--moe-grouped-gemm", "--moe-permute-fusion", "--moe-token-dispatcher-type",
}  # fmt: skip
assert set(given) <= NAMES.keys() | ELSEWHERE, set(given) - NAMES.keys() - ELSEWHERE
assert {"--swiglu", "--disable-bias-linear"} <= set(given)
fields = {NAMES[name][0]: True if value is None else NAMES[name][1](value) for name, value in given.items() if name in NAMES}
config = TransformerConfig(
    **fields, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
    use_cpu_initialization=True, perform_initialization=False, bias_dropout_fusion=False,
    bias_activation_fusion=False, apply_rope_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    moe_token_dispatcher_type="allgather",
)  # fmt: skip
layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
ahead = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False) if "--mtp-num-layers" in given else None
model = GPTModel(
    config=config, transformer_layer_spec=layers, vocab_size=int(given["--vocab-size"]), position_embedding_type="rope",
    max_sequence_length=int(given["--max-position-embeddings"]), rotary_percent=float(given["--rotary-percent"]),
    rotary_base=float(given["--rotary-base"]), mtp_block_spec=ahead,
    share_embeddings_and_output_weights="--untie-embeddings-and-output-weights" not in given,
)  # fmt: skip
assert all(not module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))  # as in training
model.eval()

from safetensors.torch import load_file, save_file  # noqa: E402

weights = load_file(asked["weights"])
own = {name for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
transient = {name for name in own if name.endswith("local_tokens_per_expert")}
assert own - transient == weights.keys(), sorted((own - transient) ^ weights.keys())[:8]
found = model.load_state_dict(weights, strict=False)
assert not found.unexpected_keys
ids = torch.tensor(asked["ids"])
length = ids.shape[1]
mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
seen = {}
if ahead is not None:
    model.mtp.register_forward_hook(lambda _, __, output: seen.update(hidden=output))
with torch.no_grad():
    positions = torch.arange(length)[None].expand_as(ids)
    if ahead is None:
        answer = {"logits": model(ids, positions, mask).float().contiguous()}
    else:  # with labels, which layers ahead require, it returns losses; the hook sees (1 + layers) x T rows, those of the model first
        model(ids, positions, mask, labels=ids)
        own_TBD, ahead_TBD = seen["hidden"].chunk(1 + int(given["--mtp-num-layers"]))
        answer = {
            "logits": (own_TBD.transpose(0, 1) @ model.output_layer.weight.T).contiguous(),
            "mtp": ahead_TBD.transpose(0, 1).contiguous(),
        }
save_file(answer, asked["out"])
