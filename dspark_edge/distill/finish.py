"""The stages after training: export, comparison with llama.cpp, lookup cache, calibration, speed.

By the clock. Gathers what the page tells. Refuses to know how the drafter was trained.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..files import fingerprint
from ..lookup_cache import LookupTexts, save_lookup_texts
from ..models.pairing import lookup_cache_path
from .batch import DraftVocabulary
from .build import all_sequences
from .clock import Clock, Pieces
from .evaluate import Acceptance
from .export import export, read_back
from .held_out import HeldOut
from .known_replies import known_replies
from .model import Drafter
from .options import Options
from .parity import Parity, check_parity
from .report import Facts
from .settings import Shares, shares_of
from .shards import ShardStore
from .target_file import TargetFile
from .train import Progress
from .trial import Trial, calibrate, measure

N_PARITY = 8  # blocks
NO_CHATS = "no-chats"  # in the work folder: no reply is to what the user wrote in chats


@dataclass(slots=True)
class Trained:
    """What the training stage leaves."""

    drafter: Drafter
    vocabulary: DraftVocabulary
    covered: float
    progress: Progress
    acceptance: Acceptance
    held_out: HeldOut


def finish(
    options: Options, target: TargetFile, trained: Trained, store: ShardStore, clock: Clock
) -> Facts:
    """Leaves the drafter under its name, its lookup cache and its calibration beside it.

    Raises DsparkError (a failed parity check), OSError.
    """
    clock.say("exporting, and comparing with llama.cpp")
    shares = shares_of(clock.total_s)
    pieces = Pieces(clock, shares.parity)
    parity = _export(options, target, trained, store, pieces)
    # Before the drafter is calibrated and measured: both are done with it, as users will have it.
    looked_up = _save_lookup_cache(options, store, trained.held_out)
    trial = _try_out(options, clock, shares, pieces.longest_s)
    return _facts(options, target, store, trained, parity, looked_up, trial)


def _export(
    options: Options,
    target: TargetFile,
    trained: Trained,
    store: ShardStore,
    pieces: Pieces,
) -> Parity:
    """Under its own name only once llama.cpp drafts from it what PyTorch does."""
    unchecked = options.out.with_name(options.out.name + ".unchecked")
    drafter, vocabulary = trained.drafter, trained.vocabulary
    provenance = _provenance(options, target, store, trained)
    export(drafter, vocabulary, target, unchecked, kind=options.kind, provenance=provenance)
    cpu = torch.device("cpu")
    read = read_back(unchecked, drafter.shape, drafter.embedding.to(cpu), drafter.head.to(cpu))
    parity = check_parity(
        options.target,
        unchecked,
        read,
        DraftVocabulary(vocabulary.ids.to(cpu), drafter.shape.n_vocab),
        _parity_prompts(store),
        kind=options.kind,
        n_threads=options.n_threads,
        is_over=pieces.is_over,
    )
    os.replace(unchecked, options.out)
    return parity


def _parity_prompts(store: ShardStore) -> Sequence[list[int]]:
    """Beginnings of sampled sequences, cut somewhere in the reply."""
    prompts: list[list[int]] = []
    for sampled in all_sequences(store):
        n = sampled.n_prompt + sampled.n_reply * (1 + len(prompts)) // (1 + N_PARITY)
        prompts.append(sampled.tokens[: max(2, n)].tolist())
        if len(prompts) == N_PARITY:
            break
    return prompts


def _save_lookup_cache(options: Options, store: ShardStore, held_out: HeldOut) -> LookupTexts | str:
    """Why there is none where there is none; what lay there was another drafter's then."""
    path = lookup_cache_path(options.out)
    # A drafter may be passed on; what its maker's chats are about may not be.
    is_private = not (options.work / NO_CHATS).exists()
    replies = [] if is_private else known_replies(store, held_out)
    if replies:
        return save_lookup_texts(path, replies)
    path.unlink(missing_ok=True)
    if is_private:
        return "none, as it would, or might, hold the replies to what you wrote in your chats"
    return "none, as all replies are held out to judge by; give more --hours"


def _provenance(
    options: Options, target: TargetFile, store: ShardStore, trained: Trained
) -> dict[str, str | int | float]:
    licence = target.licence or "unknown"
    acceptance = trained.acceptance
    return {
        "general.description": (
            f"Trained by dspark_edge.distill on text drawn from {target.name}; "
            f"the target's licence ({licence}) governs its use"
        ),
        "dspark_edge.target.name": target.name,
        "dspark_edge.target.fingerprint": fingerprint(options.target),
        "dspark_edge.n_tokens": store.n_tokens,
        "dspark_edge.n_anchors": trained.progress.n_anchors,
        "dspark_edge.cross_entropy": trained.progress.curve[-1].cross_entropy,
        "dspark_edge.tau.greedy": acceptance.greedy_tau,
        "dspark_edge.tau.sampled": acceptance.sampled_tau,
        "dspark_edge.acceptance.greedy": " ".join(f"{rate:.4f}" for rate in acceptance.greedy),
        "dspark_edge.acceptance.sampled": " ".join(f"{rate:.4f}" for rate in acceptance.sampled),
    }


def _facts(
    options: Options,
    target: TargetFile,
    store: ShardStore,
    trained: Trained,
    parity: Parity,
    looked_up: LookupTexts | str,
    trial: Trial,
) -> Facts:
    return Facts(
        target_name=target.name,
        target_file=options.target.name,
        target_hash=fingerprint(options.target),
        drafter=options.out,
        shape=trained.drafter.shape,
        kind=options.kind,
        n_sequences=len(store.numbers),
        n_tokens=store.n_tokens,
        n_draft=len(trained.vocabulary),
        covered=trained.covered,
        n_anchors=trained.progress.n_anchors,
        data_s=trained.progress.data_s,
        trained_s=trained.progress.trained_s,
        curve=trained.progress.curve,
        acceptance=trained.acceptance,
        parity=parity,
        looked_up=looked_up,
        trial=trial,
    )


def _try_out(options: Options, clock: Clock, shares: Shares, longest_s: float) -> Trial:
    """longest_s: what loading took, or a block, when parity was checked."""
    trial = Trial()
    clock.say("calibrating")
    pieces = Pieces(clock, shares.calibrate, longest_s=longest_s)
    calibrated = calibrate(
        options.target, options.out, n_threads=options.n_threads, is_over=pieces.is_over
    )
    if isinstance(calibrated, str):
        trial.notices.append(calibrated)
    else:
        trial.calibrated = calibrated
    clock.say("measuring against plain decoding")
    trial.sets = measure(
        options.target,
        options.out,
        n_threads=options.n_threads,
        cache=options.work / "costs",
        n_prompts=options.n_trial_prompts,
        is_over=Pieces(clock, shares.measure, longest_s=pieces.longest_s).is_over,
    )
    return trial
