"""Does a drafter belong to a target? Every check with its verdict, then a short run of both.

The first checks read the heads of both files; that llama.cpp agrees, and what the pair is worth, is
seen by running it. Refuses to know how either is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._core import DrafterFile
from ..calibration import load_calibration
from ..cost import CostTable
from ..engine import Engine
from ..errors import PairError
from ..loading import load
from ..lookup_cache import told_of
from ..sequence import SamplingParams, Stats
from .gguf_header import GgufHeader, read_header
from .memory_estimate import n_vocab_of

PROMPTS = (
    "List the days of the week in order.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that adds two numbers.",
)
MAX_TOKENS = 64
CHECK_CTX = 1024
CHECK_DEPTH = 128  # tokens in the cache, about, while it runs
SPECIAL = ("bos", "eos")
EPSILON = 0.05  # logits: a lead smaller than this may flip between passes of different width
SOME_TAU = 1.3  # below it the drafter is hardly ever right
PAYS = 1.03  # times plain decoding's speed: what passes are timed to
TOKENS_KEY = "tokenizer.ggml.tokens"


@dataclass(slots=True, frozen=True)
class Check:
    """One check: what was looked at, whether it is as it must be, and what was found."""

    name: str
    ok: bool
    found: str


@dataclass(slots=True, frozen=True)
class Run:
    """What the three prompts gave. same_text: as without speculation, ties within noise aside.

    gain: times plain decoding's speed that this acceptance promises at this machine's cost of
    passes, when the best number of draft tokens, verify_len, is verified.
    """

    n_tokens: int
    n_verified: int
    n_accepted: int
    n_rounds: int
    same_text: bool
    gain: float
    verify_len: int

    @property
    def pays(self) -> bool:
        """Whether the drafter is worth its memory here."""
        return self.same_text and self.gain >= PAYS

    @property
    def acceptance(self) -> float:
        """Share of the verified draft tokens that were accepted."""
        return self.n_accepted / self.n_verified if self.n_verified else 0.0

    @property
    def tau(self) -> float:
        """Tokens gained per round."""
        return self.n_tokens / self.n_rounds if self.n_rounds else 0.0


def check_files(target: Path, drafter: Path) -> Iterator[Check]:
    """The checks that need no load, in order. Raises ModelError when a file is no GGUF."""
    t, d = read_header(target), read_header(drafter)
    yield _same_tokens(t, d)
    for name in SPECIAL:
        key = f"tokenizer.ggml.{name}_token_id"
        a, b = t.metadata.get(key), d.metadata.get(key)
        yield Check(f"{name} token", a == b, f"{a} in the target, {b} in the drafter")
    a, b = t.count("embedding_length"), d.count("embedding_length")
    yield Check("hidden size", a == b, f"{a} in the target, {b} in the drafter")
    taps, n_layer = d.of_arch("target_layers") or [], t.count("block_count")
    inside = bool(taps) and all(0 <= layer <= n_layer for layer in taps)
    yield Check("tapped layers", inside, f"{taps} of the target's layers 0 to {n_layer - 1}")
    mask, n_vocab = d.metadata.get("tokenizer.ggml.mask_token_id"), t.length(TOKENS_KEY)
    in_vocab = isinstance(mask, int) and 0 <= mask < n_vocab
    yield Check("mask token", in_vocab, f"{mask} of {n_vocab} tokens")
    yield _drafter_file(drafter)


def run_pair(
    target: Path,
    drafter: Path,
    *,
    n_threads: int | None = None,
    n_gpu_layers: int = -1,
    tell: Callable[[str], None] = lambda what: None,
) -> Run:
    """Three prompts at temperature 0, with the drafter always on and without it, and the passes of
    this machine timed (a few seconds, kept as the chat keeps them). tell: is told what begins, each
    step of which takes seconds.

    Raises PairError or ModelError when llama.cpp does not load them together, MemoryPlanError when
    they do not fit.
    """

    tell("loading both, and timing this machine's passes unless the chat has done so")
    has_template = bool(read_header(target).metadata.get("tokenizer.chat_template"))
    loaded = load(
        target,
        drafter=drafter,
        n_ctx=CHECK_CTX,
        n_seq=1,
        n_threads=n_threads,
        n_gpu_layers=n_gpu_layers,
        speculation="auto",  # times the passes
        verify_len=None,
        cost_cache=None,
    )
    cost = loaded.speculation.cost
    with Engine.from_loaded(loaded) as engine:
        engine.set_speculation("off")
        tell(f"{len(PROMPTS)} prompts without the drafter")
        plain = [_reply(engine, prompt, has_template) for prompt in PROMPTS]
        engine.set_speculation("always")
        tell(f"{len(PROMPTS)} prompts with it")
        drafted = [_reply(engine, prompt, has_template) for prompt in PROMPTS]
        gain, verify_len = promise(cost, engine.acceptance_by_position)
    return Run(
        n_tokens=sum(stats.n_tokens for _, stats in drafted),
        n_verified=sum(stats.n_verified for _, stats in drafted),
        n_accepted=sum(stats.n_accepted for _, stats in drafted),
        n_rounds=sum(stats.n_rounds for _, stats in drafted),
        same_text=all(_same(a, b) for a, b in zip(drafted, plain, strict=True)),
        gain=gain,
        verify_len=verify_len,
    )


def promise(cost: CostTable, by_position: Sequence[tuple[int, int]]) -> tuple[float, int]:
    """(times plain decoding's speed, draft tokens verified) where the first is highest.

    by_position: (n_right, n_observed) as Engine.acceptance_by_position. At least one is verified.
    """
    plain_tps = 1.0 / (cost.verify_s(1, CHECK_DEPTH) + cost.other_s)
    best, survival, tokens = (0.0, 0), 1.0, 1.0
    for k, (n_right, n_observed) in enumerate(by_position, start=1):
        survival *= n_right / n_observed if n_observed else 0.0
        tokens += survival
        verify_tokens = 1 + k  # the anchor too
        round_s = cost.draft_s(1) + cost.verify_s(verify_tokens, CHECK_DEPTH) + cost.other_s
        best = max(best, (tokens / round_s / plain_tps, k), key=lambda each: each[0])
    return best


def expected(drafter: Path) -> str:
    """What is known beforehand of the drafter's worth: what its file or its calibration says."""
    header = read_header(drafter)
    said = {k: v for k, v in header.metadata.items() if "tau" in k.replace(".", "_").split("_")}
    said |= {k: v for k, v in header.metadata.items() if "acceptance" in k}
    known = [_calibrated(drafter), ", ".join(f"{key} = {value}" for key, value in said.items())]
    promised = "; ".join(filter(None, known)) or (
        "not known: the file states nothing, and no calibration lies beside it"
    )
    looked_up = told_of(drafter, n_vocab=n_vocab_of(header))
    return f"{promised}; lookup cache: {looked_up}" if looked_up else promised


def _calibrated(drafter: Path) -> str:
    """What the calibration beside the drafter promises; "" where there is none."""
    calibration = load_calibration(drafter, n_slots=DrafterFile(str(drafter)).n_draft)
    if calibration is None or not calibration.typical:
        return ""
    survival = [sum(column) / len(column) for column in zip(*calibration.typical, strict=True)]
    shares = " ".join(f"{100 * share:.0f} %" for share in survival)
    return (
        f"tau {1 + sum(survival):.2f} with a whole block verified, {shares} of the blocks right "
        "up to there, by the calibration beside it"
    )


def verdict(run: Run) -> str:
    """One sentence on a run."""
    if not run.same_text:
        return "the text with the drafter differs from the text without: do not use it; report it"
    if run.n_verified == 0:
        return "the drafter drafted nothing: it is of no use here"
    if run.pays:
        return "the pair works and pays on this machine"
    if run.tau >= SOME_TAU:
        return (
            "the pair works but does not pay on this machine, where verifying costs more than the "
            "drafts gain: it would be parked"
        )
    return (
        "the pair loads but is not worth it, the drafter is hardly ever right: it was made for "
        "another model, another template, or with thinking the other way"
    )


def _reply(engine: Engine, prompt: str, has_template: bool) -> tuple[str, Stats]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    messages = [{"role": "user", "content": prompt}]
    text, stats = "", Stats()
    for chunk in engine.chat(messages, params) if has_template else engine.generate(prompt, params):
        text, stats = text + chunk.text, chunk.stats
    return text, stats


def _same(a: tuple[str, Stats], b: tuple[str, Stats]) -> bool:
    return a[0] == b[0] or min(a[1].min_margin, b[1].min_margin) < EPSILON


def _same_tokens(t: GgufHeader, d: GgufHeader) -> Check:
    a, b = t.read_list(TOKENS_KEY), d.read_list(TOKENS_KEY)
    if len(a) != len(b):
        return Check("vocabulary", False, f"{len(a)} tokens in the target, {len(b)} in the drafter")
    differ = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    if not differ:
        return Check("vocabulary", bool(a), f"{len(a)} tokens, all with the same text")
    i = differ[0]
    found = f"{len(differ)} of {len(a)} tokens differ, first {i}: {a[i]!r} and {b[i]!r}"
    return Check("vocabulary", False, found)


def _drafter_file(drafter: Path) -> Check:
    try:
        file = DrafterFile(str(drafter))
    except PairError as error:
        return Check("drafter file", False, str(error))
    heads = "Markov head" if file.has_markov_head else "no Markov head"
    heads += ", confidence head" if file.has_confidence else ", no confidence head"
    return Check("drafter file", True, f"block_size {file.block_size}, {heads}")
