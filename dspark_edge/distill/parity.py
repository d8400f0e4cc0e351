"""Whether llama.cpp drafts from an exported file what PyTorch does.

Both see the same features: the target evaluates the same tokens in the same passes for either.
Refuses to know training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .._core import BlockDecoder, DecoderConfig, Draft, SamplingConfig
from ..errors import DsparkError
from .batch import DraftVocabulary
from .model import Drafter
from .settings import Kind

SEQ_ID = 0
MIN_BLOCKS = 2  # compared however late it is
# In logits. Of q8_0 llama.cpp rounds the activations as well, in every product: three times the
# largest difference of 95 slots of the drafter that comes with this package (0.131; median 0.037).
# Tiny drafters came to 0.062.
TOLERANCE: dict[Kind, float] = {"f16": 1e-2, "q8_0": 0.4}
# In probability; the largest of the same slots was 0.0051.
CONFIDENCE_TOLERANCE: dict[Kind, float] = {"f16": 1e-2, "q8_0": 0.02}


@dataclass(slots=True)
class Parity:
    """Blocks compared, and the largest differences: of the lead of a draft token over the
    runner-up, in logits, and of confidence. n_ties: blocks whose tokens differ from where two
    tokens stood closer than the tolerance."""

    n_blocks: int
    lead_error: float
    confidence_error: float
    n_ties: int


def check_parity(
    target: Path,
    exported: Path,
    drafter: Drafter,
    vocabulary: DraftVocabulary,
    prompts: Sequence[Sequence[int]],
    *,
    kind: Kind,
    n_threads: int,
    is_over: Callable[[], bool] = lambda: False,
) -> Parity:
    """drafter: the exported file's weights, on the CPU. prompts: token ids, each at least 2; a
    block is drafted from each one's last token. is_over: asked in front of loading and of each
    block; then no more than MIN_BLOCKS are compared.

    Raises DsparkError when the two differ by more than the format explains.
    """
    n_ctx = max(len(prompt) for prompt in prompts) + drafter.shape.block_size

    def decoder(drafter_path: str) -> BlockDecoder:
        return BlockDecoder(
            DecoderConfig(
                target_path=str(target),
                drafter_path=drafter_path,
                n_ctx=n_ctx,
                n_seq=1,
                n_batch=max(512, n_ctx),  # a prompt is one pass, for both
                n_threads=n_threads,
            )
        )

    is_over()
    tapped, pair = decoder(""), decoder(str(exported))
    tapped.tap(list(drafter.shape.taps))
    result = Parity(0, 0.0, 0.0, 0)
    try:
        for prompt in prompts:
            if is_over() and result.n_blocks >= MIN_BLOCKS:
                break
            *before, anchor = prompt
            for each in (tapped, pair):
                each.open_sequence(SEQ_ID, SamplingConfig())
                each.rewind(SEQ_ID, 0)
                each.prefill(SEQ_ID, before)
            features = torch.from_numpy(tapped.tapped_rows()[0])
            theirs = pair.draft([SEQ_ID], [anchor])[0]
            ours = _draft(drafter, vocabulary, features, anchor)
            _compare(result, ours, theirs, kind)
    finally:
        tapped.close()
        pair.close()
    return result


@dataclass(slots=True)
class _Slot:
    token: int
    lead: float
    confidence: float


@torch.no_grad()
def _draft(
    drafter: Drafter, vocabulary: DraftVocabulary, features: torch.Tensor, anchor: int
) -> list[_Slot]:
    """The greedy chain of one block."""
    context = drafter.context(features)
    anchors, positions = torch.tensor([anchor]), torch.tensor([len(features)])
    hidden = drafter.hidden(context, anchors, positions)[0]
    slots: list[_Slot] = []
    token = anchor
    for row in hidden:
        markov = drafter.markov_rows(torch.tensor(token))
        logits = drafter.head.float() @ row + drafter.markov_w2 @ markov
        best = logits.topk(2)
        token = int(vocabulary.ids[best.indices[0]])
        confidence = drafter.confidence_logit(row, markov).sigmoid()
        slots.append(_Slot(token, float(best.values[0] - best.values[1]), float(confidence)))
    return slots


def _compare(result: Parity, ours: Sequence[_Slot], theirs: Draft, kind: Kind) -> None:
    tolerance, of_confidence = TOLERANCE[kind], CONFIDENCE_TOLERANCE[kind]
    result.n_blocks += 1
    tokens, confidences, leads = theirs
    for slot, (mine, token, confidence, lead) in enumerate(
        zip(ours, tokens, confidences, leads, strict=True)
    ):
        if mine.token != token:
            if max(mine.lead, lead) <= tolerance:
                result.n_ties += 1
                break  # from here on the chains stand behind different tokens
            raise DsparkError(
                f"llama.cpp drafts token {token} in slot {slot} where PyTorch drafts "
                f"{mine.token}, {mine.lead:.3f} logits ahead; the exported file is not used"
            )
        result.lead_error = max(result.lead_error, abs(mine.lead - lead))
        result.confidence_error = max(result.confidence_error, abs(mine.confidence - confidence))
    if result.lead_error > tolerance or result.confidence_error > of_confidence:
        raise DsparkError(
            f"llama.cpp and PyTorch differ by {result.lead_error:.4f} logits and "
            f"{result.confidence_error:.4f} in confidence; at most {tolerance} and {of_confidence} "
            "are explained by the file's format, so it is not used"
        )
