"""What is known of a model from its file alone: its vocabulary and its chat template.

Keeps the last ones read. Refuses to know engines, and which model is in memory.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ..errors import ModelError
from .catalogue import Entry
from .errors import ApiError
from .prompts import PromptTemplate
from .vocabulary import Vocabulary

N_TEXTS_KEPT = 2  # vocabularies in memory at most, apart from those in use


@dataclass(slots=True, frozen=True)
class ModelText:
    """What turns messages into tokens, for one model."""

    vocabulary: Vocabulary
    template: PromptTemplate | None  # None: the model has none
    no_template: str = ""  # why

    def need_template(self) -> PromptTemplate:
        """The template, or ApiError."""
        if self.template is None:
            raise ApiError(400, self.no_template, code="no_chat_template", param="model")
        return self.template


class ModelTexts:
    """ModelTexts by file; a file that changes is read again. Belongs to the event loop."""

    __slots__ = ("_chat_template", "_texts")

    def __init__(self, chat_template: str | None) -> None:
        """chat_template: used instead of every model's own; None: theirs."""
        self._chat_template = chat_template
        self._texts: dict[tuple[str, int], ModelText] = {}

    async def of(self, entry: Entry) -> ModelText:
        """A model's, read in a worker thread where need be. Raises ApiError."""
        try:
            key = (str(entry.path), entry.path.stat().st_mtime_ns)
            text = self._texts.get(key)
            if text is None:
                text = await asyncio.to_thread(self._read, entry)
        except (OSError, ModelError) as error:
            raise ApiError(
                503, f"model {entry.id} cannot be read: {error}", code="model_failed", param="model"
            ) from error
        self._texts[key] = text
        while len(self._texts) > N_TEXTS_KEPT:
            del self._texts[next(iter(self._texts))]
        return text

    def _read(self, entry: Entry) -> ModelText:
        vocabulary = Vocabulary(entry.path)
        source = self._chat_template or vocabulary.metadata("tokenizer.chat_template")
        try:
            template = PromptTemplate(source, begin=vocabulary.begin_text, end=vocabulary.end_text)
        except ModelError as error:
            return ModelText(vocabulary, None, f"model {entry.id}: {error}")
        return ModelText(vocabulary, template)
