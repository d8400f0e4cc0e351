"""The drafter in PyTorch: parallel backbone with injected keys and values, Markov and confidence
heads.

The same numbers as llama.cpp's dflash graph (src/models/dflash.cpp) and DSpark (arXiv 2607.05147),
arranged for training: all anchors of a sequence at once, its context projected once. Refuses to
know losses and files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .settings import Shape

START_SCALE = 0.5  # of the final norm: flat drafts to begin with
ANCHORS_AT_ONCE = 64  # in attention: their weights stay in a CPU's cache


@dataclass(slots=True)
class Context:
    """Keys and values of one sequence's tokens, per layer: [n_head_kv, n, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]


class RMSNorm(nn.Module):
    """llama.cpp's: over the last dimension, with a weight."""

    def __init__(self, n: int, eps: float, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((n,), start))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _matrix(n_out: int, n_in: int) -> nn.Parameter:
    # Layers write as much as they read: where head and embedding are one matrix, an anchor that
    # stayed in the stream would be drafted again, with great certainty.
    return nn.Parameter(torch.randn(n_out, n_in) / math.sqrt(n_in))


class Layer(nn.Module):
    """One layer; matrices [n_out, n_in]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        n, dim = shape.n_embd, shape.head_dim
        self.attn_norm, self.ffn_norm = RMSNorm(n, shape.eps), RMSNorm(n, shape.eps)
        self.attn_q_norm, self.attn_k_norm = RMSNorm(dim, shape.eps), RMSNorm(dim, shape.eps)
        self.attn_q = _matrix(shape.n_head * dim, n)
        self.attn_k = _matrix(shape.n_head_kv * dim, n)
        self.attn_v = _matrix(shape.n_head_kv * dim, n)
        self.attn_output = _matrix(n, shape.n_head * dim)
        self.ffn_gate = _matrix(shape.n_ff, n)
        self.ffn_up = _matrix(shape.n_ff, n)
        self.ffn_down = _matrix(n, shape.n_ff)
        self._dim = dim

    def key_value(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [..., n_embd] in the type of the products, turn: rope's cosine and sine [..., 1, dim /
        2] -> [..., n_head_kv, dim]."""
        k = heads_of(product(x, self.attn_k), self._dim)
        v = heads_of(product(x, self.attn_v), self._dim)
        return rotate(self.attn_k_norm(k.float()), turn).to(x.dtype), v

    def query(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """As key_value, all heads."""
        q = heads_of(product(x, self.attn_q), self._dim)
        return rotate(self.attn_q_norm(q.float()), turn).to(x.dtype)

    def feed_forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What the layer's second half adds to the stream; dtype: of the products."""
        h = self.ffn_norm(x).to(dtype)
        gated = functional.silu(product(h, self.ffn_gate)) * product(h, self.ffn_up)
        return product(gated, self.ffn_down)


class Drafter(nn.Module):
    """embedding [n_vocab, n_embd] and head [n_draft, n_embd] are the target's and stay as they are.

    feature_rms [n_feature]: what features are divided by. markov_w1: None while training, when W1 =
    E P with E the embedding at unit length; or a table [n_vocab, rank] from a file. train_dtype:
    what the factors of the backbone's products are rounded to while gradients are taken; weights,
    stream, norms and heads are float32 always, and so is all that is judged.
    """

    feature_rms: Tensor
    embedding: Tensor
    head: Tensor

    def __init__(
        self,
        shape: Shape,
        embedding: Tensor,
        head: Tensor,
        feature_rms: Tensor,
        markov_w1: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.train_dtype = torch.float32
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("feature_rms", feature_rms)
        self.markov_w1 = markov_w1
        self.fc = _matrix(shape.n_embd, shape.n_feature)
        self.enc_norm = RMSNorm(shape.n_embd, shape.eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))
        self.output_norm = RMSNorm(shape.n_embd, shape.eps, START_SCALE)
        self.markov_p = _matrix(shape.n_embd, shape.rank)
        self.markov_w2 = nn.Parameter(torch.zeros(len(head), shape.rank))
        self.confidence = nn.Parameter(torch.zeros(shape.n_embd + shape.rank))
        self.confidence_bias = nn.Parameter(torch.zeros(1))

    def context(self, features: Tensor) -> Context:
        """Keys and values of tokens at positions 0.. from their features [n, n_feature]."""
        scaled = (features / self.feature_rms).to(self._dtype)
        fused = self.enc_norm(product(scaled, self.fc).float()).to(self._dtype)
        turn = self._turn(torch.arange(len(features), device=features.device))
        pairs = [layer.key_value(fused, turn) for layer in self._layers()]
        return Context([k.transpose(0, 1) for k, _ in pairs], [v.transpose(0, 1) for _, v in pairs])

    def hidden(self, context: Context, anchors: Tensor, positions: Tensor) -> Tensor:
        """Blocks from anchors [n] (token ids) at positions [n], each seeing the context in front of
        it -> [n, block_size, n_embd] after the final norm."""
        n, size = len(anchors), self.shape.block_size
        tokens = anchors.new_full((n, size), self.shape.mask_token)
        tokens[:, 0] = anchors
        x = self.embed(tokens)
        turn = self._turn(positions[:, None] + torch.arange(size, device=positions.device))
        for layer, keys, values in zip(self._layers(), context.keys, context.values, strict=True):
            h = layer.attn_norm(x).to(self._dtype)
            own = layer.key_value(h, turn)
            mixed = attend_in_parts(layer.query(h, turn), (keys, values), own, positions)
            x = x + product(mixed, layer.attn_output)
            x = x + layer.feed_forward(x, self._dtype)
        return torch.as_tensor(self.output_norm(x))

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., n_embd]."""
        return self.embedding[tokens].float()

    def markov_rows(self, tokens: Tensor) -> Tensor:
        """W1 of tokens that stand in front of a slot: [..., rank]."""
        if self.markov_w1 is not None:
            return self.markov_w1[tokens]
        return unit_rows(self.embed(tokens)) @ self.markov_p

    def confidence_logit(self, hidden: Tensor, markov_rows: Tensor) -> Tensor:
        """[...] from [..., n_embd] and [..., rank]."""
        n = self.shape.n_embd
        own = hidden @ self.confidence[:n] + markov_rows @ self.confidence[n:]
        return own + self.confidence_bias

    @property
    def _dtype(self) -> torch.dtype:
        return self.train_dtype if torch.is_grad_enabled() else torch.float32

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., 1, dim / 2] of rope's angles (llama.cpp's NEOX pairs)."""
        dim = self.shape.head_dim
        steps = torch.arange(0, dim, 2, dtype=torch.float64)
        rate = (self.shape.rope_base ** (-steps / dim)).float().to(positions.device)
        angle = positions.unsqueeze(-1).unsqueeze(-1).float() * rate
        return angle.cos(), angle.sin()


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..., n_in] times a matrix [n_out, n_in], in the type of x."""
    return x @ matrix.to(x.dtype).T


def heads_of(x: Tensor, dim: int) -> Tensor:
    """[..., heads * dim] -> [..., heads, dim]."""
    return x.view(*x.shape[:-1], -1, dim)


def unit_rows(rows: Tensor) -> Tensor:
    """Rows scaled to a root mean square of 1."""
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-12)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rope on half-split pairs: x [..., heads, dim]."""
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def attend_in_parts(
    q: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], positions: Tensor
) -> Tensor:
    """As attend, some anchors at a time, over no more of the context than the last of them sees.
    positions [n]: of the anchors, rising."""
    mixed: list[Tensor] = []
    place_of = positions.tolist()
    for begin in range(0, len(place_of), ANCHORS_AT_ONCE):
        part = slice(begin, begin + ANCHORS_AT_ONCE)
        n_seen = place_of[part][-1]
        seen = (context[0][:, :n_seen], context[1][:, :n_seen])
        places = torch.arange(n_seen, device=positions.device)
        is_hidden = places >= positions[part, None]
        mixed.append(attend(q[part], seen, (own[0][part], own[1][part]), is_hidden))
    return torch.cat(mixed)


def attend(
    q: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    is_hidden: Tensor,
) -> Tensor:
    """Each block over the context it may see and over all of itself.

    q [n, size, n_head, dim]; context [n_head_kv, m, dim]; own [n, size, n_head_kv, dim]; is_hidden
    [n, m] -> [n, size, n_head * dim].
    """
    n, size, n_head, dim = q.shape
    n_kv, n_context = context[0].shape[:2]
    q = q.view(n, size, n_kv, -1, dim).permute(2, 3, 0, 1, 4) / math.sqrt(dim)  # kv, share, n, size
    flat = q.reshape(n_kv, -1, dim)
    far = (flat @ context[0].transpose(1, 2)).view(n_kv, -1, n, size, n_context)
    far = far.masked_fill(is_hidden[:, None, :], -torch.inf)
    own_k = own[0].permute(2, 0, 1, 3).unsqueeze(1)  # kv, 1, n, size, dim
    own_v = own[1].permute(2, 0, 1, 3).unsqueeze(1)
    weights = torch.cat([far, q @ own_k.transpose(-1, -2)], dim=-1).softmax(-1)
    far_w, own_w = torch.split(weights, [n_context, size], dim=-1)
    mixed: Tensor = (far_w.reshape(n_kv, -1, n_context) @ context[1]).view(n_kv, -1, n, size, dim)
    mixed = mixed + own_w @ own_v
    return mixed.permute(2, 3, 0, 1, 4).reshape(n, size, n_head * dim)
