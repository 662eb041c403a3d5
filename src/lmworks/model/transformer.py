"""The decoder.

Shapes: B batch, T time, D hidden, V vocabulary, L sparse layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmworks.host.devices import at_least_fp32
from lmworks.model import documents
from lmworks.model.attention import Attention
from lmworks.model.balance import step_loss
from lmworks.model.cache import Cache, JoinedCache, LayerCache
from lmworks.model.layers import MLP, Linear, RMSNorm, SwiGLU, feed_forward, times
from lmworks.model.lightning import Lightning
from lmworks.model.loss import ChunkLoss, HeadLoss, chunk_loss, head_loss, head_loss_plain, soft_cap
from lmworks.model.mixers import mixer
from lmworks.model.mla import LatentAttention
from lmworks.model.moe import MoE
from lmworks.model.mtp import Ahead, MtpLayer, look_ahead
from lmworks.model.rope import cos_sin, frequencies, signed
from lmworks.recipe.schema.model import Model, Rope


@dataclass(frozen=True)
class LayerStats:
    """Statistics of the layers in one forward pass: tokens per expert (L, E), and the auxiliary loss, summed over tokens; where they are
    recorded, the largest score of each head of attention (A, H), in A layers; and, until they are part of the auxiliary loss, the shares of
    the experts (L, E) (`router.Routing`)."""

    counts: Tensor | None = None
    aux: Tensor | None = None
    logits_AH: Tensor | None = None
    shares: Tensor | None = None

    @classmethod
    def of(cls, layers: Sequence[tuple[Tensor | None, ...]]) -> LayerStats:
        """Of what each block returns besides the residual stream."""
        found = ([layer[part] for layer in layers if layer[part] is not None] for part in range(4))
        counts, aux, shares, logits = (torch.stack(parts) if parts else None for parts in found)  # type: ignore[arg-type]
        return cls(counts, None if aux is None else aux.sum(), logits, shares)

    def joined(self, after: LayerStats) -> LayerStats:
        """The statistics of these layers and of the following ones."""
        counts, logits, shares = (
            torch.cat((own, next_)) if own is not None and next_ is not None else next_ if own is None else own
            for own, next_ in ((self.counts, after.counts), (self.logits_AH, after.logits_AH), (self.shares, after.shares))
        )
        return LayerStats(counts, _sum(self.aux, after.aux), logits, shares)

    def with_step_loss(self, counts_LE: Tensor, top_k: int) -> LayerStats:
        """With the auxiliary loss over the whole step, whose tokens per expert are given."""
        assert self.shares is not None
        return LayerStats(self.counts, _sum(self.aux, step_loss(self.shares, counts_LE, top_k)), self.logits_AH)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


@dataclass(frozen=True)
class Loss:
    """Sums over the valid tokens. `total` is the training loss: cross-entropy + z-loss + auxiliary loss and, in training, the weighted mean
    loss of multi-token prediction, whose mean cross-entropy is `mtp`.
    """

    total: Tensor
    head: HeadLoss
    layers: LayerStats
    mtp: Tensor | None = None


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); with post-norm x + norm(attention(x)), then x + norm(ffn(x)) (OLMo 2,
    arXiv:2501.00656, section 3.3); with norms on both sides x + norm(attention(norm(x))), then x + norm(ffn(norm(x))) (Gemma 2,
    arXiv:2408.00118, section 2); with norms on the stream x = norm(x), then x + attention(x), and the same with ffn (MiniMax-01). The
    layer number decides what takes the place of attention (`lmworks.model.mixers`), and whether the layer is dense or has experts; in some
    models a layer is one of the two blocks alone (Nemotron-H, arXiv:2504.03624).
    """

    def __init__(self, config: Model, layer: int) -> None:
        super().__init__()
        assert config.hidden_size and config.intermediate_size
        mixes, feeds = config.mixer(layer) != "none", config.feed_forward(layer)
        both = config.norm_position == "both"

        def norm(there: bool) -> RMSNorm | None:
            return RMSNorm(config.hidden_size or 0, config.rms_norm_eps) if there else None

        self.attention_norm = norm(mixes)
        self.attention = mixer(config, layer) if mixes else None
        self.attention_out_norm = norm(mixes and both)
        self.ffn_norm = norm(feeds != "none")
        self.ffn: MoE | SwiGLU | MLP | None = None
        factors = config.factors
        if feeds == "moe" and config.moe:
            self.ffn = MoE(config.moe, config.hidden_size, config.hidden_act, config.router_eps)
        elif feeds == "mlp":
            self.ffn = feed_forward(config.hidden_size, config.intermediate_size, config.hidden_act, factors.gate)
        self.ffn_out_norm = norm(feeds != "none" and both)
        self.mixer_stream, self.mixer_out = factors.of_mixer(config.mixer(layer))
        self.ffn_stream, self.ffn_out = factors.ffn_stream, factors.ffn_out
        self.post_norm = config.norm_position == "post"
        self.stream_norm = config.norm_position == "stream"
        self.records_logits = False  # whether passes with gradients return the largest score of each head of attention
        self.in_place = False  # of an inference model: the residual stream is added to, not made anew
        self.dropout = config.residual_dropout

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], mask: documents.Visible | documents.Documents | None,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """The new x; for an MoE layer also its tokens per expert, its auxiliary loss and the shares of its experts; and the largest score
        of each head, where they are recorded."""
        logits: list[Tensor] = []
        if self.attention is not None and self.attention_norm is not None:
            read = x_BTD if self.post_norm else self.attention_norm(x_BTD)
            x_BTD = read if self.stream_norm else x_BTD
            after = self.attention_norm if self.post_norm else self.attention_out_norm
            recorded = (logits,) if self.records_logits and torch.is_grad_enabled() else ()
            x_BTD = self._add(x_BTD, self.attention(read, rope, mask, cache, *recorded), after, self.mixer_stream, self.mixer_out)
        logits_H = logits[0] if logits else None
        if self.ffn is None or self.ffn_norm is None:
            return x_BTD, None, None, None, logits_H
        read = x_BTD if self.post_norm else self.ffn_norm(x_BTD)
        x_BTD = read if self.stream_norm else x_BTD
        after = self.ffn_norm if self.post_norm else self.ffn_out_norm
        if isinstance(self.ffn, MoE):
            out, routing = self.ffn(read)
            x_BTD = self._add(x_BTD, out, after, self.ffn_stream, self.ffn_out)
            return x_BTD, routing.counts, routing.aux, routing.shares, logits_H
        return self._add(x_BTD, self.ffn(read), after, self.ffn_stream, self.ffn_out), None, None, None, logits_H

    def _add(self, x_BTD: Tensor, out_BTD: Tensor, norm: RMSNorm | None, stream: float, out: float) -> Tensor:
        """x times `stream` plus what a block gives times `out`; both factors are 1 in most models."""
        x_BTD, out_BTD = times(x_BTD, stream), times(out_BTD, out)
        added = out_BTD if norm is None else norm(out_BTD)
        return x_BTD.add_(added) if self.in_place else x_BTD + self._drop(added)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Transformer(nn.Module):
    """A decoder-only language model, dense or mixture-of-experts according to `config`.

    `compute_dtype` is the dtype of the activations, fp64 only where no gradients are needed; weights are fp32. `plain(True)` selects the
    reference implementations.
    """

    inverse_frequencies: Tensor
    sliding_inverse_frequencies: Tensor | None

    def __init__(self, config: Model) -> None:
        super().__init__()
        assert config.vocab_size and config.hidden_size and config.num_hidden_layers and config.head_dim
        self.config = config
        self.compute_dtype = torch.float32
        self.prepared = False  # whether `lmworks.inference.model` has made it
        self.joined = False  # whether it has joined the projections of attention
        self.logit_chunk_size = 1024
        self.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size), freeze=False)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding.weight  # type: ignore[assignment]
        mtp_layers = config.mtp.num_nextn_predict_layers if config.mtp else 0
        self.mtp = nn.ModuleList(MtpLayer(config, Block(config, config.num_hidden_layers + depth)) for depth in range(mtp_layers))
        self.auxiliary_factor: float | Tensor = 1.0  # of the routers' auxiliary loss in the training loss
        # for balance method aux: the tokens per expert (L, E) of the whole step from those of a pass, if that is not the whole step
        self.step_counts: Callable[[Tensor], Tensor] | None = None
        self.records_logits = False
        self._plain = False
        self._chunk_loss: ChunkLoss = chunk_loss
        self.factors = config.factors
        self.norm_blend: Tensor | None = None
        self.configure(config)

    @property
    def rope(self) -> Rope:
        """The positions in force."""
        return self.config.rope

    def set_rope(self, rope: Rope) -> None:
        """`configure` with other positions."""
        self.configure(self.config.model_copy(update={"rope": rope}))

    def configure(self, config: Model) -> None:
        """Set what may change while a model is trained, at its start or at a phase boundary: positions, windows, the balancing of experts,
        and the weight of multi-token prediction. The weights have the shapes of `config`."""
        self.config, rope, mla, head_dim = config, config.rope, config.mla, config.head_dim
        assert head_dim
        self.mtp_loss_weight = config.mtp.loss_weight if config.mtp else 0.0
        device = next(self.parameters()).device
        for layer, block in self.numbered_blocks():
            if isinstance(block.attention, Lightning):
                block.attention.configure(device)
            if isinstance(block.attention, Attention):
                block.attention.uses_rope, block.attention.slides = config.has_positions(layer), config.slides(layer)
        if config.moe is not None:
            for ffn in self.moe_layers():
                ffn.router.moe = config.moe
        sliding = None
        with torch.device("cpu"):  # on the meta device they are computed by functions of the compiler, which takes a second to import
            inverse, self.rope_scale = frequencies(rope, mla.qk_rope_head_dim if mla else head_dim)
            if config.sliding_rope is not None:
                sliding, self.sliding_rope_scale = frequencies(config.sliding_rope, head_dim)
        if mla:  # only a part of each head is rotated, but YaRN's factor applies to the whole score
            for block in self.every_block():
                if isinstance(block.attention, LatentAttention):
                    block.attention.score_scale = self.rope_scale**2
            self.rope_scale = 1.0
        self.norm_blend = None
        self.set_norm_blend(config.qk_norm_blend)
        self.register_buffer("inverse_frequencies", inverse.to(device), persistent=False)
        self.register_buffer("sliding_inverse_frequencies", None if sliding is None else sliding.to(device), persistent=False)

    def set_norm_blend(self, blend: float) -> None:
        """Set `qk_norm_blend`. Below 1 it is a tensor, which compiled layers read anew; at 1 layers compute as without a blend."""
        if blend != self.config.qk_norm_blend:
            self.config = self.config.model_copy(update={"qk_norm_blend": blend})
        if blend == 1:
            self.norm_blend = None
        elif self.norm_blend is None:
            self.norm_blend = torch.full((), blend, device=next(self.parameters()).device)
        else:
            self.norm_blend.fill_(blend)
        for block in self.every_block():
            if isinstance(block.attention, Attention):
                block.attention.norm_blend = self.norm_blend

    def plain(self, on: bool = True) -> Transformer:
        """Use the reference implementations of attention, experts and loss."""
        self._plain = on
        for module in self.modules():
            if hasattr(module, "plain") and not isinstance(module, Transformer):
                setattr(module, "plain", on)  # noqa: B010  (a module's attributes are not known to the type checker)
        return self

    def record_logits(self) -> None:
        """From now on passes with gradients return the largest score of each head of attention."""
        self.records_logits = True
        for layer, block in self.numbered_blocks():
            block.records_logits = layer in self.config.attention_layers

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layers, which share their code, and the loss of a chunk.

        Evaluation and generation stay eager: their shapes vary, and each would be recompiled. Only `forward` is compiled, without the
        hooks of a module.
        """
        for block in self.every_block():
            block.forward = _in_training(block, torch.compile(block.forward, *args, **kwargs), block.forward)
        self._chunk_loss = torch.compile(self._chunk_loss, *args, **kwargs)

    def forward(self, tokens_BT: Tensor, cu_seqlens: Tensor | None = None, cache: Cache | JoinedCache | None = None) -> Tensor:
        """Logits (B, T, V) in fp32, or fp64 if `compute_dtype` is."""
        hidden, _ = self.hidden(tokens_BT, cu_seqlens, cache)
        return self.logits(hidden)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Logits (B, T, V) of hidden states, as from `forward`."""
        hidden_BTD = times(hidden_BTD, self.factors.logits)
        return soft_cap(at_least_fp32(self.head(hidden_BTD)), self.config.final_logit_softcapping)

    def loss(
        self, tokens_BT: Tensor, labels_BT: Tensor, cu_seqlens: Tensor | None = None, cache: Cache | JoinedCache | None = None,
        ahead: list[Ahead] | None = None, weights_BT: Tensor | None = None,
    ) -> Loss:  # fmt: skip
        """Summed loss over the labels that are not IGNORE; divide by the valid tokens of the whole step.

        `ahead`: inputs and targets of multi-token prediction, needed if the rows are only slices. `weights_BT`: factors of the
        cross-entropy of each label, without z-loss; all 1 when left out.
        """
        spans = self.spans(tokens_BT, cu_seqlens, cache)
        x_BTD, layers = self.blocks(self.embed(tokens_BT), spans, cache)
        return self.last_loss(x_BTD, layers, tokens_BT, labels_BT, spans, cache, ahead, weights_BT)

    def last_loss(
        self, x_BTD: Tensor, layers: LayerStats, tokens_BT: Tensor, labels_BT: Tensor, spans: documents.Documents,
        cache: Cache | JoinedCache | None = None, ahead: list[Ahead] | None = None, weights_BT: Tensor | None = None,
    ) -> Loss:  # fmt: skip
        """`loss` from the output of the layers: the residual stream and the statistics of the layers."""
        hidden_BTD = self.norm(x_BTD)
        total, head = self.head_loss(hidden_BTD, labels_BT, weights_BT)
        mtp = None
        if self.mtp and self.training:
            ahead = ahead or look_ahead(tokens_BT, labels_BT, spans.positions_BT, len(self.mtp))
            mtp_total, mtp, mtp_layers = self.mtp_loss(hidden_BTD, ahead, spans, cache)
            total, layers = total + self.mtp_loss_weight * mtp_total, layers.joined(mtp_layers)
        if layers.shares is not None and layers.counts is not None and self.config.moe is not None:
            counts = layers.counts if self.step_counts is None else self.step_counts(layers.counts)
            layers = layers.with_step_loss(counts, self.config.moe.num_experts_per_tok)
        return Loss(total if layers.aux is None else total + layers.aux * self.auxiliary_factor, head, layers, mtp)

    def mtp_loss(
        self, hidden_BTD: Tensor, ahead: list[Ahead], spans: documents.Documents, cache: Cache | JoinedCache | None = None
    ) -> tuple[Tensor, Tensor, LayerStats]:
        """The mean loss and the mean cross-entropy over the layers of multi-token prediction, and their statistics."""
        rotations = self.rotations(spans)
        totals, entropies, layers = [], [], []
        for depth, (layer, (tokens_BT, labels_BT)) in enumerate(zip(self.mtp, ahead, strict=True)):
            attention: Any = layer.block.attention  # type: ignore[union-attr]
            mask, rope = spans.of(attention), rotations[attention.slides]
            place = cache.layer((self.config.num_hidden_layers or 0) + depth) if cache else None
            hidden_BTD, *statistics = layer(hidden_BTD, self.embed(tokens_BT), rope, mask, place)
            layers.append(tuple(statistics))
            total, head = self.head_loss(hidden_BTD, labels_BT)
            totals.append(total)
            entropies.append(head.cross_entropy)
        return torch.stack(totals).mean(), torch.stack(entropies).mean(), LayerStats.of(layers)

    def head_loss(self, hidden_BTD: Tensor, labels_BT: Tensor, weights_BT: Tensor | None = None) -> tuple[Tensor, HeadLoss]:
        """The summed loss of normed hidden states, and its parts; `weights_BT` as in `loss`."""
        hidden_BTD = times(hidden_BTD, self.factors.logits)
        inputs = (hidden_BTD.flatten(0, 1), self.head.weight, labels_BT.flatten())
        softcap, z_weight = self.config.final_logit_softcapping, self.config.z_loss_weight
        weights_N = None if weights_BT is None else weights_BT.flatten()
        if self._plain:
            return head_loss_plain(*inputs, softcap=softcap, z_weight=z_weight, weights_N=weights_N)
        return head_loss(
            *inputs, softcap=softcap, z_weight=z_weight, chunk=self.logit_chunk_size, chunk_loss=self._chunk_loss, weights_N=weights_N
        )

    def hidden(
        self, tokens_BT: Tensor, cu_seqlens: Tensor | None = None, cache: Cache | JoinedCache | None = None
    ) -> tuple[Tensor, LayerStats]:
        """The normed output of the last layer (B, T, D), and the statistics of the layers."""
        spans = self.spans(tokens_BT, cu_seqlens, cache)
        x_BTD, layers = self.blocks(self.embed(tokens_BT), spans, cache)
        return self.norm(x_BTD), layers

    def cache(self, rows: int, capacity: int, behind: int = 0) -> Cache:
        """Room for the keys and values of so many rows, of at most `capacity` tokens each. Layers with a window hold `behind` tokens more
        than it shows."""
        return Cache(self.config, rows, capacity, self.embedding.weight.device, self.compute_dtype, behind=behind)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Tokens as vectors (B, T, D) in the type of the activations."""
        embedded_BTD = F.embedding(tokens_BT, self.embedding.weight).to(self.compute_dtype)
        if self.config.scale_embeddings:
            embedded_BTD = embedded_BTD * self._embedding_scale()
        return times(embedded_BTD, self.factors.embedding)

    def _embedding_scale(self) -> float:
        """The square root of the width, rounded to the type of the activations as in `transformers`."""
        return float(torch.tensor((self.config.hidden_size or 1) ** 0.5).to(self.compute_dtype))

    def spans(self, tokens_BT: Tensor, cu_seqlens: Tensor | None, cache: Cache | JoinedCache | None) -> documents.Documents:
        """Positions, and who sees whom."""
        window = int(self.config.sliding_window) if self.config.sliding_window else None
        if cache is None:
            return documents.from_cu_seqlens((tokens_BT.shape[0], tokens_BT.shape[1]), cu_seqlens, window, tokens_BT.device)
        assert cu_seqlens is None  # a cached row is one document
        return documents.Documents(cache.begin(tokens_BT.shape[1]), *cache.masks(window))

    def blocks(self, x_BTD: Tensor, spans: documents.Documents, cache: Cache | JoinedCache | None = None) -> tuple[Tensor, LayerStats]:
        """Through the layers: the residual stream (B, T, D), and the statistics of the layers."""
        rotations = self.rotations(spans)
        layers: list[tuple[Tensor | None, ...]] = []
        for index, block in enumerate(self.layers):
            attention: Any = block.attention
            mask, rope = (None, rotations[0]) if attention is None else (spans.of(attention), rotations[attention.slides])
            x_BTD, *statistics = block(x_BTD, rope, mask, cache.layer(index) if cache else None)
            layers.append(tuple(statistics))
        return x_BTD, LayerStats.of(layers)

    def rotations(self, spans: documents.Documents) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Cosines and sines of the positions, as the layers want them: those of layers that see everything, and of sliding ones."""
        whole = self._rotation(spans, self.inverse_frequencies, self.rope_scale)
        sliding = self.sliding_inverse_frequencies
        return whole, whole if sliding is None else self._rotation(spans, sliding, self.sliding_rope_scale)

    def _rotation(self, spans: documents.Documents, inverse: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        cos, sin = cos_sin(spans.positions_BT, inverse, scale, self.compute_dtype)
        return cos, signed(sin) if self.joined else sin

    def every_block(self) -> list[Any]:
        """The layers (`Block`), and then those of multi-token prediction."""
        return [*self.layers, *(layer.block for layer in self.mtp)]

    def numbered_blocks(self) -> list[tuple[int, Any]]:
        """`every_block` with the numbers of the layers, of which a pipeline stage has some; MTP continues the numbers."""
        numbers = [int(name) for name, _ in self.layers.named_children()]
        numbers += [(self.config.num_hidden_layers or 0) + depth for depth in range(len(self.mtp))]
        return list(zip(numbers, self.every_block(), strict=True))

    def moe_layers(self) -> list[MoE]:
        """The sparse layers' feed-forward parts, in order, those of multi-token prediction last."""
        return [block.ffn for block in self.every_block() if isinstance(block.ffn, MoE)]


def _in_training(block: nn.Module, compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        return (compiled if block.training and torch.is_grad_enabled() else eager)(*args)

    return forward
