"""MODEL_ARGS: the arguments by which slime's Megatron builds the same model, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from lmworks.errors import UserError
from lmworks.recipe.schema.model import Model, Moe

CLASSES = ("Glm4MoeForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True)
class Argument:
    """One argument with its value (None for a switch) and its reason."""

    name: str
    value: str | None
    reason: str


def model_arguments(model: Model, family: str) -> list[Argument]:
    """The arguments for a model of one of `CLASSES`. Raises `UserError` for a model that slime's Megatron cannot build."""
    _refuse(model, family)
    assert model.num_attention_heads and model.num_key_value_heads
    found = [
        Argument("--num-layers", str(model.num_hidden_layers), "num_hidden_layers"),
        Argument("--hidden-size", str(model.hidden_size), "hidden_size"),
        Argument("--ffn-hidden-size", str(model.intermediate_size), "intermediate_size, of the dense layers"),
        Argument("--num-attention-heads", str(model.num_attention_heads), "num_attention_heads"),
        Argument("--group-query-attention", None, "key/value heads are stated on their own"),
        Argument("--num-query-groups", str(model.num_key_value_heads), "num_key_value_heads"),
        Argument("--kv-channels", str(model.head_dim), "head_dim, which need not be hidden_size over heads"),
        Argument("--vocab-size", str(model.vocab_size), "rows of the embedding; Megatron pads them, and slime removes the padding"),
        Argument("--max-position-embeddings", str(int(model.max_position_embeddings or 2048)), "max_position_embeddings"),
        Argument("--seq-length", str(min(int(model.max_position_embeddings or 2048), 4096)),
                 "a placeholder, since the length varies; slime's own of 4096 is refused for a shorter context"),
        Argument("--normalization", "RMSNorm", "the norm of all these classes"),
        Argument("--norm-epsilon", repr(model.rms_norm_eps), "rms_norm_eps: Megatron's default may be another"),
        Argument("--swiglu", None, "feed-forward layers with gates"),
        Argument("--disable-bias-linear", None, "no biases but those below"),
        Argument("--position-embedding-type", "rope", "rotary positions"),
        Argument("--rotary-base", str(int(model.rope.theta)), "rope_theta: it differs between models of one architecture"),
        Argument("--rotary-percent", repr(model.rope.partial_rotary_factor), "partial_rotary_factor"),
        Argument("--attention-dropout", "0", "the model has none; Megatron's default is 0.1"),
        Argument("--hidden-dropout", "0", "the model has none; Megatron's default is 0.1"),
        Argument("--attention-softmax-in-fp32", None, "as the model computes it"),
    ]  # fmt: skip
    if model.rope.scaling == "linear":
        found.append(Argument("--rotary-seq-len-interpolation-factor", str(int(model.rope.factor)), "rope_type linear"))
    if model.attention_bias:
        found.append(Argument("--add-qkv-bias", None, "attention_bias: on query, key and value alone"))
    if model.use_qk_norm:
        found.append(Argument("--qk-layernorm", None, "use_qk_norm: without it Megatron drops these weights"))
    if not model.tie_word_embeddings:
        found.append(Argument("--untie-embeddings-and-output-weights", None, "the head is a matrix of its own"))
    if model.moe is not None:
        found += _experts(model, model.moe)
    if model.mtp is not None:
        depth = model.mtp.num_nextn_predict_layers
        found.append(Argument("--mtp-num-layers", str(depth), "layers of multi-token prediction: without this they are lost in silence"))
    return found


def _experts(model: Model, moe: Moe) -> list[Argument]:
    dense, layers = moe.first_k_dense_replace, model.num_hidden_layers or 0
    found = [
        Argument("--num-experts", str(moe.n_routed_experts), "routed experts"),
        Argument("--moe-layer-freq", f"[0]*{dense}+[1]*{layers - dense}", "first_k_dense_replace: which layers have experts"),
        Argument("--moe-ffn-hidden-size", str(moe.moe_intermediate_size), "moe_intermediate_size"),
        Argument("--moe-router-topk", str(moe.num_experts_per_tok), "num_experts_per_tok"),
        Argument("--moe-router-score-function", moe.scoring_func, "gates of the router"),
        Argument("--moe-router-dtype", "fp32", "as it was trained: rounding sends tokens to other experts"),
        Argument("--moe-router-load-balancing-type", "seq_aux_loss", "with weight 0: no loss beside the policy's"),
        Argument("--moe-aux-loss-coeff", "0", "tuning changes the experts' loads little, and a loss would move the policy"),
        Argument("--moe-token-dispatcher-type", "alltoall", "tokens are sent to the ranks of their experts"),
        Argument("--moe-grouped-gemm", None, "the experts of a rank are one call"),
        Argument("--moe-permute-fusion", None, "fewer passes over the tokens"),
    ]
    if moe.n_shared_experts:
        width = moe.n_shared_experts * moe.moe_intermediate_size
        found.append(Argument("--moe-shared-expert-intermediate-size", str(width), "n_shared_experts times moe_intermediate_size"))
    if moe.scoring_func == "sigmoid":
        found += [
            Argument("--moe-router-pre-softmax", None, "gates are computed over all experts before the selection"),
            Argument("--moe-router-enable-expert-bias", None, "the selection bias decides which experts are selected"),
            Argument("--moe-router-bias-update-rate", "0", "the selection bias stays as it is, and equal to that of the rollouts"),
            Argument("--moe-router-topk-scaling-factor", f"{moe.routed_scaling_factor:g}", "routed_scaling_factor"),
        ]
    if moe.topk_group < moe.n_group:
        found += [
            Argument("--moe-router-num-groups", str(moe.n_group), "n_group"),
            Argument("--moe-router-group-topk", str(moe.topk_group), "topk_group"),
        ]
    return found


def _refuse(model: Model, family: str) -> None:
    if family not in CLASSES:
        raise UserError(f"slime's loader has no class that equals {family} here; it trains {', '.join(CLASSES)}")
    moe = model.moe
    for wrong, what in (
        (model.sliding_window is not None, "a sliding window"),
        (model.rope.scaling not in ("none", "linear"), f"rope scaling {model.rope.scaling}"),
        (model.rope.theta % 1 != 0, f"rope_theta {model.rope.theta}, no whole number"),
        (model.rope.scaling == "linear" and model.rope.factor % 1 != 0, f"a rope factor of {model.rope.factor}, no whole number"),
        (moe is not None and not moe.norm_topk_prob, "weights of experts that are not normalized"),
        (moe is not None and moe.num_experts_per_tok == 1, "one expert per token, whose weight Megatron does not normalize"),
    ):
        if wrong:
            raise UserError(f"the model has {what}, which slime's Megatron computes differently or not at all; it cannot be handed over")
