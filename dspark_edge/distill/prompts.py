"""Prompts without a data set: drawn from the target itself, mixed with those the user gives.

Keeps them in a file as they come, so that a killed run goes on. Refuses to know replies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .._core import BlockDecoder
from ..bench.block_recorder import read_prompts
from ..errors import DsparkError, ModelError
from ..files import write_atomically
from ..prompt import ChatTemplate
from .sampling import Job, Reply

MARK = "\u2983user text\u2984"  # in no template
DRAWN_TEMPERATURE = 1.0
DRAWN_MAX_TOKENS = 96
DRAWN_SEED = 1 << 32  # apart from the seeds of replies
MIN_CHARS = 8
MAX_REFUSED = 256
BASE_PROMPT_TOKENS = 12  # of a text that a model without a template is to go on with


@dataclass(slots=True, frozen=True)
class Frame:
    """The target's chat template around a user's text; both empty for a base model."""

    prefix: str
    suffix: str

    @property
    def is_chat(self) -> bool:
        """Whether there is a template."""
        return bool(self.prefix or self.suffix)

    def tokens(self, decoder: BlockDecoder, text: str) -> list[int]:
        """The prompt of a user's text."""
        whole = self.prefix + text + self.suffix
        return decoder.tokenize(whole, add_special=not self.is_chat)


def frame_of(decoder: BlockDecoder) -> Frame:
    """Raises ModelError when the template drops or changes what users write."""
    template = decoder.metadata("tokenizer.chat_template")
    if not template.strip():
        return Frame("", "")
    bos, eos = (
        decoder.token_bytes(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
        for token in (decoder.bos_token, decoder.eos_token)
    )
    text = ChatTemplate(template, bos=bos, eos=eos).render([{"role": "user", "content": MARK}])
    prefix, found, suffix = text.partition(MARK)
    if not found:
        raise ModelError("the chat template does not show the user's text; give another model")
    return Frame(prefix, suffix)


def read_given(path: Path) -> list[str]:
    """The user's own prompts: JSON lines with "prompt" or "turns" (the first counts), or plain
    text, a prompt a line.

    Raises ValueError (nothing in it, a bad line, no UTF-8), OSError.
    """
    if path.suffix in (".jsonl", ".json"):
        return [turns[0] for turns in read_prompts(path)]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as that") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


class PromptSource:
    """Prompts by number: given ones and drawn ones mixed, each text once; given ones again, with
    other seeds, when they are used up. A number's prompt is the same in each run."""

    def __init__(
        self,
        decoder: BlockDecoder,
        frame: Frame,
        given: list[str],
        cache: Path,
        *,
        drawn_share: float = 0.5,
    ) -> None:
        """cache: file of the drawn ones, gone on with. drawn_share: of the numbers; all of them
        where no prompts are given."""
        self._decoder = decoder
        self._frame = frame
        self._given = list(dict.fromkeys(given))
        self._drawn_share = drawn_share if given else 1.0
        self._cache = cache
        tried = _read_tried(cache)
        self._n_tried = len(tried)
        self._n_begun = len(tried)
        self._n_refused = 0  # in a row
        self._drawn = [text for text in tried if text]
        self._known = set(self._drawn) | set(self._given)
        start = decoder.tokenize(frame.prefix, add_special=not frame.is_chat)
        self._start = start or [max(0, decoder.eos_token)]

    def is_ready(self, number: int) -> bool:
        """Whether a prompt can be had without drawing another."""
        is_given, index = self._place(number)
        return is_given or index < len(self._drawn)

    def draw(self) -> Job:
        """The sampling of another prompt; `take` its reply."""
        n_max = DRAWN_MAX_TOKENS if self._frame.is_chat else BASE_PROMPT_TOKENS
        self._n_begun += 1
        seed = DRAWN_SEED + self._n_begun
        return Job(seed, self._start, DRAWN_TEMPERATURE, n_max, is_tapped=False)

    def take(self, reply: Reply) -> None:
        """Keeps a drawn prompt, if it is new and long enough.

        Raises DsparkError when too many in a row were not.
        """
        text = b"".join(map(self._decoder.token_bytes, reply.tokens)).decode("utf-8", "ignore")
        text = text.strip()
        if len(text) < MIN_CHARS or text in self._known:
            text = ""
        self._n_tried += 1
        self._n_refused = 0 if text else self._n_refused + 1
        if self._n_refused > MAX_REFUSED:
            raise DsparkError(
                f"the target wrote {MAX_REFUSED} prompts in a row that are empty or repeated; "
                "give some with --prompts"
            )
        with self._cache.open("a", encoding="utf-8") as file:
            file.write(json.dumps(text) + "\n")
        if text:
            self._known.add(text)
            self._drawn.append(text)

    def text(self, number: int) -> str:
        """Raises IndexError when it has not been drawn."""
        is_given, index = self._place(number)
        if is_given:
            return self._given[index % len(self._given)]
        return self._drawn[index]

    def prompt(self, number: int) -> list[int]:
        """Token ids, as the template has them."""
        return self._frame.tokens(self._decoder, self.text(number))

    def _place(self, number: int) -> tuple[bool, int]:
        n_drawn = int(number * self._drawn_share)  # of the numbers before
        if int((number + 1) * self._drawn_share) > n_drawn:
            return False, n_drawn
        return True, number - n_drawn


def _read_tried(cache: Path) -> list[str]:
    """What earlier runs drew, "" for what was refused; a line that a kill cut is mended."""
    if not cache.exists():
        return []
    tried: list[str] = []
    for line in cache.read_text(encoding="utf-8").splitlines():
        try:
            tried.append(str(json.loads(line)))
        except ValueError:
            break
    write_atomically(cache, "".join(json.dumps(text) + "\n" for text in tried))
    return tried


def numbers_from(done: set[int]) -> Iterator[int]:
    """0, 1, 2, ... without those done."""
    number = 0
    while True:
        if number not in done:
            yield number
        number += 1
