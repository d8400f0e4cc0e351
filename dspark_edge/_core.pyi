"""Contract of the C++ core (csrc/).

All calls that run a model drop the GIL. A second thread that enters a BlockDecoder while a call is
running gets DecodeError. Wrong arguments raise ValueError. Nothing here keeps a reference to the
lists that it is given.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .signals import DraftSignals

built_against: str  # version of llama-cpp-python

class SamplingConfig:
    """How one sequence is sampled. Checked when it is used, not when it is made. penalty_from: a
    position; tokens in front of it do not count for the three penalties."""

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        penalty_last_n: int = 64,
        penalty_from: int = 0,
        seed: int = 0,
        logit_bias: Sequence[tuple[int, float]] = ...,
        grammar: str = "",
        n_logprobs: int = -1,
    ) -> None: ...

class DecoderConfig:
    """What a BlockDecoder loads: exactly one of target_path and target_address (a llama_model* that
    the caller keeps alive), and how large its contexts are. n_ctx is per sequence. target_id and
    drafter_id tell the files' contents from others: a saved sequence goes back only under the same.
    own_cells gives each sequence cells of its own: faster where it has one token in each pass. The
    sequences of a pass must then be in rising order and have equally many tokens.
    chain_in_graph leaves the drafter's Markov chain to llama.cpp even where the host is faster.
    """

    def __init__(
        self,
        *,
        target_path: str = "",
        target_address: int = 0,
        drafter_path: str = "",
        n_ctx: int = 4096,
        n_seq: int = 4,
        n_batch: int = 512,
        n_threads: int = 0,
        n_gpu_layers: int = -1,
        max_verify_len: int = 8,
        own_cells: bool = False,
        chain_in_graph: bool = False,
        target_id: str = "",
        drafter_id: str = "",
    ) -> None: ...

class DrafterFile:
    """What a drafter's GGUF says about itself. Raises PairError when it is not a usable drafter."""

    def __init__(self, path: str) -> None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def n_draft(self) -> int: ...
    @property
    def has_confidence(self) -> bool: ...
    @property
    def has_markov_head(self) -> bool: ...
    @property
    def sample_from_anchor(self) -> bool: ...
    @property
    def target_layers(self) -> list[int]: ...

class Draft(NamedTuple):
    """A draft for one sequence. tokens [n_draft]; confidence [n_draft], 0..1, or empty without a
    confidence head; certainty [n_draft]: lead of the drawn token over the runner-up, in logits, at
    most 1e4."""

    tokens: list[int]
    confidence: list[float]
    certainty: list[float]

class Verdict(NamedTuple):
    """What a sequence gained: tokens [n_accepted + 1], the last one being the next anchor (unless
    none could be drawn); margins [same]: lead over the runner-up, in logits, where that was cut off
    too, and inf where there is none; logprobs [same], when asked for: (token, log-probability) of
    the emitted token, then of the likeliest ones; error: why the sequence cannot go on (no token
    could be drawn, or its cache could not be restored and is empty), or ""."""

    tokens: list[int]
    n_accepted: int
    margins: list[float]
    logprobs: list[list[tuple[int, float]]]
    error: str

class DeviceMemory:
    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...

class MemoryUse:
    @property
    def target_model_bytes(self) -> int: ...
    @property
    def target_context_bytes(self) -> int: ...
    @property
    def target_compute_bytes(self) -> int: ...
    @property
    def drafter_model_bytes(self) -> int: ...
    @property
    def drafter_context_bytes(self) -> int: ...
    @property
    def drafter_compute_bytes(self) -> int: ...

class BlockDecoder:
    """Raises ModelError (target), PairError (drafter), ValueError (config)."""

    def __init__(
        self, config: DecoderConfig, progress: Callable[[float], bool] | None = None
    ) -> None:
        """Loads the models, without the GIL.

        progress: called while files are read, in this thread, with 0..1 of all of them together;
        False ends the loading with ModelError or PairError, and what it raises is raised here.
        """

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raises ValueError when a parameter is out of range or the grammar does not parse."""

    def open_sequence(self, seq_id: int, sampling: SamplingConfig) -> None:
        """Opens a sequence, or gives an open one new sampling; its cache stays as it is.

        Raises ValueError as check_sampling does.
        """

    def close_sequence(self, seq_id: int) -> None:
        """Empties the caches of a sequence and closes it."""

    def n_past(self, seq_id: int) -> int:
        """Tokens of the sequence in the target's cache; the anchor is not one of them."""

    def prefill(self, seq_id: int, tokens: Sequence[int], for_drafter: bool = True) -> None:
        """Evaluates 1 to n_batch tokens behind those in the cache.

        for_drafter: whether the drafter takes them all; otherwise it sees no more than the last.
        The last token of a prompt is left out: it is the first anchor. Raises ContextFullError,
        and DecodeError with the sequence as before (a recurrent one may have been emptied).
        """

    def rewind(self, seq_id: int, n_keep: int) -> int:
        """Cuts the caches to n_keep tokens. Returns the tokens left: n_keep, or 0 where the target
        cannot be cut there (recurrent, or its sliding window moved on): the sequence is empty."""

    def save_sequence(self, seq_id: int) -> bytes:
        """A sequence as bytes: its tokens, both caches, the drafter's features that wait.

        Raises ValueError when it holds no tokens, DecodeError, MemoryError.
        """

    def restore_sequence(self, seq_id: int, blob: bytes) -> list[int]:
        """Puts what save_sequence gave into an open sequence, instead of what that holds.

        Returns its tokens. A decoder without a drafter takes the target's part. Raises ValueError
        with the sequence as before (damaged, another build, target or drafter, more tokens than
        n_ctx), and DecodeError with the sequence empty (llama.cpp refuses the state). The checksum
        finds damage, not malice: such bytes are as trusted as a model file.
        """

    def draft(self, seq_ids: Sequence[int], anchors: Sequence[int]) -> list[Draft]:
        """One drafter pass over all given sequences: a full block for each."""

    def verify(
        self, seq_ids: Sequence[int], verify_tokens: Sequence[Sequence[int]]
    ) -> list[Verdict]:
        """One target pass over all given sequences; verify_tokens[i] = anchor, then at most
        max_verify_len draft tokens. Raises ContextFullError, and DecodeError with the sequences as
        before (a recurrent one may have been emptied: see n_past)."""

    def tap(self, layers: Sequence[int]) -> None:
        """From now on each target pass keeps the inputs of these layers; none: no longer.

        Raises ValueError when the decoder has a drafter, ModelError when llama.cpp cannot tap them.
        """

    def tapped_rows(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Of the last pass, a row per token: features [n, n_layers * n_embd], layers side by side
        as a drafter reads them, and the head's inputs [n, n_embd] ([0, 0] after a prefill).

        Raises ValueError when nothing was tapped since.
        """

    def time_step(self, n_tokens: int, depth: int) -> float:
        """Seconds of a target pass over n_tokens behind `depth` tokens, on a closed sequence."""

    def time_draft(self, n_seq: int) -> float:
        """Seconds of a drafter pass over n_seq sequences; all must be closed."""

    def release_drafter_context(self) -> None:
        """Frees the drafter's context and the target's taps; drafting then raises ValueError."""

    def release_drafter(self) -> None:
        """Frees the drafter's context and weights; drafting then raises ValueError."""

    def load_drafter_weights(self) -> None:
        """Loads released weights. Raises PairError (file gone or another one, no memory), and
        ValueError when no drafter was given."""

    def load_drafter(self) -> None:
        """Loads what is released of weights and context; raises as load_drafter_weights does.

        Sequences that hold tokens are drafted for from a gap: the drafter sees what follows only.
        """

    def close(self) -> None:
        """Frees everything; any later call raises ValueError."""

    def memory_use(self) -> MemoryUse: ...
    def tokenize(
        self, text: str | bytes, add_special: bool = True, parse_special: bool = True
    ) -> list[int]: ...
    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """Bytes of a token; control tokens have none unless `special`."""

    def metadata(self, key: str) -> str:
        """A scalar of the target's GGUF as text; "" when there is none."""

    @property
    def eog_tokens(self) -> list[int]: ...
    @property
    def bos_token(self) -> int: ...
    @property
    def eos_token(self) -> int: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def n_seq(self) -> int: ...
    @property
    def n_batch(self) -> int: ...
    @property
    def max_verify_len(self) -> int: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def n_ctx_train(self) -> int: ...
    @property
    def has_drafter(self) -> bool:
        """Whether it can draft now; a released drafter cannot."""

    @property
    def block_size(self) -> int: ...
    @property
    def n_draft(self) -> int: ...
    @property
    def has_confidence(self) -> bool: ...
    @property
    def can_roll_back(self) -> bool: ...
    @property
    def no_roll_back_reason(self) -> str: ...
    @property
    def is_recurrent(self) -> bool:
        """Whether some layers of the target keep a state instead of a cache of tokens."""

    @property
    def decode_s(self) -> float:
        """Seconds spent in passes so far, a drafter's chain on the host included."""

    @property
    def graph_chain_reason(self) -> str:
        """Why llama.cpp's graph runs the drafter's Markov chain, as far as drafts have shown; "":
        the host does, in a fraction of the time, or there is no drafter."""

    @property
    def n_rebuilds(self) -> int:
        """How often a cache refused to be cut and a sequence was evaluated again."""

class LookupCache:
    """A static lookup cache: which token followed which in replies known beforehand.

    Every token of a reply with at least 3 tokens in front of it is an entry of its context, which
    is the up to 6 tokens in front of it in the same reply. Immutable: all sequences share one.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> None:
        """tokens [n]: of all replies, one after the other. lengths [n_replies]: of each.

        Keeps the GIL, for some 20 ms at 400,000 tokens, and takes up to 32 bytes a token. Raises
        ValueError (a negative token or length, lengths that do not add up to n, not one dimension)
        and TypeError (a dtype that int32 does not hold).
        """

    @property
    def n_tokens(self) -> int: ...
    @property
    def max_token(self) -> int:
        """The largest token; -1 when there is none."""

class LookupProposal(NamedTuple):
    """Draft tokens (maybe none), where they are from, and their record; lists run over the tokens.

    match_len: how many last tokens of the sequence equal those in front of the copied place, 2 to
    16, or those of the cache's context, 3 to 6; 0 when there are no draft tokens.
    is_cached: whether the tokens are the cache's, and no copy from the sequence.
    agreement: the log odds that the token is what follows the two tokens before it, counted over
    the sequence so far (half a count is added to both sides).
    cache_agreement: the same of the cache's entries for the longest known context, within -4..4; 0
    where it knows none. cache_count: how many entries that are, at most 128, the first in order of
    their contexts (last token first, a shorter one in front), then of the replies. Both are empty
    without a cache.
    """

    tokens: list[int]
    match_len: int
    is_cached: bool
    agreement: list[float]
    cache_agreement: list[float]
    cache_count: list[int]

class LookupIndex:
    """Prompt lookup in one sequence: proposes the continuation of the latest earlier occurrence of
    the longest known n-gram (2 to 4 tokens) or, where fewer than 3 tokens match, what a cache
    knows. Keeps the cache alive."""

    def __init__(self, cache: LookupCache | None = None) -> None: ...
    def __len__(self) -> int:
        """Tokens of the sequence."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens of the prompt or of the reply.

        Raises ValueError at a negative token, with the sequence as before.
        """

    def propose(self, n_max: int) -> LookupProposal:
        """Up to n_max draft tokens for the positions after the sequence.

        After a short match fewer (8, or as many as match): what is hardly ever right costs time to
        estimate. A copy may run past the end into its own output, so a repetition is continued.
        The cache goes on with its likeliest token, of equals the smallest, while it knows the
        context.
        """

    def propose_behind(self, tokens: list[int], n_max: int) -> LookupProposal:
        """The same behind `tokens`: appends those that the sequence lacks first, all in one call.

        tokens: the sequence and what follows; its known part is not compared. Raises ValueError
        when it is shorter, and as extend.
        """

class Comparison(NamedTuple):
    """How a draft compares with the other proposer's for the same place.

    n_same: first tokens that both have. logits: of those in the other's draft, as it is believed
    alone, and of the first that differs, if both have one there; each within -4..4.
    """

    n_same: int
    logits: list[float]

class SurvivalNumbers:
    """The weights of a survival model and how firmly each is known, by slot and kind of token.

    Each resolved slot moves its weights by one Newton step with a diagonal, slowly forgotten
    precision: what an offline fit knows well moves little.

    All that take a draft keep the GIL, for some microseconds, and raise ValueError when it is
    longer than n_slots or its lists differ in length, AttributeError or TypeError when it
    is no DraftSignals.
    """

    def __init__(
        self,
        weights: Sequence[Sequence[float]],
        precision: Sequence[Sequence[float]],
        *,
        precision_min: float,
        recent_start: float,
        recent_smoothing: float,
    ) -> None:
        """weights, precision [n_slots][n_features]: as named in signals.FEATURES.

        precision_min: forgetting ends there. recent_start, recent_smoothing: of the acceptance that
        counts where signals know none, per slot. Raises ValueError at another shape.
        """

    @property
    def n_slots(self) -> int:
        """Longest draft, in tokens."""

    @property
    def acceptance_by_position(self) -> list[tuple[int, int]]:
        """(n_right, n_observed) of each slot of the drafter, given that those before were right."""

    @property
    def lookup_acceptance_by_position(self) -> list[tuple[int, int]]:
        """The same for lookup."""

    @property
    def weights(self) -> list[list[float]]:
        """A copy, [n_slots][n_features]."""

    @property
    def precision(self) -> list[list[float]]:
        """A copy, [n_slots][n_features]."""

    def set_row(self, slot: int, weights: Sequence[float], precision: Sequence[float]) -> None:
        """One number per feature each, for one slot, from 0. Raises ValueError at another number of
        them, or no such slot."""

    def features(self, signals: DraftSignals) -> list[tuple[float, ...]]:
        """What the weights are applied to: for each token the features of its kind."""

    def survival(self, signals: DraftSignals, floor: float = 0.0) -> list[float]:
        """a_k for each draft token: non-increasing, strictly between 0 and 1.

        It ends behind the first below `floor`: nobody needs to know how unlikely the rest is.
        """

    def against(self, signals: DraftSignals, rival: DraftSignals) -> DraftSignals:
        """The draft, compared with the other proposer's for the same place, if both have one.

        Two that agree are right more often than either alone. A new object, or else `signals`.
        """

    def observe(self, signals: DraftSignals, n_correct: int, n_seen: int) -> None:
        """Learn from one resolved draft.

        Slots 1..n_correct were right and, if n_correct < n_seen, the next was wrong. Slots beyond
        the first wrong one or beyond n_seen are censored: they say nothing.
        Raises ValueError unless 0 <= n_correct <= n_seen <= number of draft tokens.
        """

def device_memory() -> list[DeviceMemory]:
    """Free and total memory of the devices llama.cpp sees; for the CPU, free is given as total."""

def draw_token(
    logits: npt.NDArray[np.float32],
    sampling: SamplingConfig,
    position: int,
    before: Sequence[int] = ...,
) -> tuple[int, float]:
    """The emission rule on one row [n_vocab]: (token, margin); token -1 when none is allowed."""

def gumbel_noise(seed: int, position: int, token: int) -> float:
    """The standard Gumbel noise of one token at one position."""
