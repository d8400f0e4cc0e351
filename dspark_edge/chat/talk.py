"""A conversation going on with an engine: asks, tries again, makes room, takes other models.

Owns the turns and how the next reply is sampled. Refuses to know how lines are typed and what
commands are called.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..arguments import check_ctx, check_threads, gpu_notice
from ..engine import Engine
from ..errors import ContextFullError
from ..files import refuse_existing
from ..models import target_path
from ..sequence import SamplingParams, Stats
from ..speculation import Mode
from ..thoughts import THINK
from . import figures, kept
from .conversation import Conversation, Message, Turn
from .options import drafter_for, given_sampling, sampling_params
from .reply import Reply, ScreenView, SilentView, make_reply
from .screen import Screen

MIN_ROOM = 16  # tokens for a reply, below which the context counts as full
KEPT_SHARE = 0.75  # of the context, at most, when turns had to go: not again with the next message


class Talk:
    """One conversation. Owns its engine, which `close` frees.

    Raises as Engine does.
    """

    def __init__(self, args: argparse.Namespace, screen: Screen) -> None:
        self.args = args
        self.screen = screen
        self.params: SamplingParams = sampling_params(args)
        if args.trace:  # before seconds of loading
            refuse_existing(Path(args.trace).expanduser())
        self.engine: Engine = _load_engine(args, args.model)
        self.model: str = args.model
        self.conversation = Conversation(system=args.system or "")
        self.stats: Stats | None = None  # of the last reply
        self.edit: Callable[[str], str] = lambda text: text  # lets the user change a text
        self.session = ""  # name that it was last saved or loaded under
        default = "show" if screen.is_terminal else "hide"
        self.shows_thoughts: bool = (args.thoughts or default) == "show"
        self.speculation: Mode = args.speculation  # as it was last asked for
        self.trace = ""  # the file that a trace goes to
        if args.trace:
            self.trace_to(args.trace)

    def trace_to(self, path: str) -> None:
        """Writes a trace from now on; "": none. Raises ValueError, for an existing file too."""
        if path:
            file = Path(path).expanduser()
            refuse_existing(file)
            self.engine.trace_to(file)
        else:
            self.engine.stop_trace()
        self.trace = path

    def set_speculation(self, mode: Mode) -> None:
        """Switches it, for models taken later too. Raises ValueError as Engine does."""
        self.engine.set_speculation(mode)
        self.speculation = mode

    def banner(self) -> list[str]:
        """What is loaded, and how, in at most six lines."""
        return figures.banner(self.engine, asked_for=drafter_for(self.args, self.model))

    def close(self) -> None:
        """Frees the models and ends the trace."""
        self.engine.close()

    # ------------------------------------------------------------ replies

    def ask(self, text: str, *, seed: int | None = None) -> Reply:
        """Streams the reply to a message, and keeps both; Ctrl-C ends the reply.

        seed: for this reply only. Raises DsparkError and ValueError; the conversation is as before
        then.
        """
        turn = Turn(text)
        self.conversation.turns.append(turn)
        said: list[str] = []  # before the reply
        notices: list[str] = []  # behind it
        try:
            prompt, is_thinking = self._prompt(said.append)
            for line in said:
                self.screen.state(line)
            reply = make_reply(
                self.engine,
                prompt,
                self.params if seed is None else replace(self.params, seed=seed),
                view=self._view(),
                is_thinking=is_thinking,
                more_room=lambda n_replied: self._more_room(n_replied, notices),
            )
        except BaseException:
            self.conversation.undo()
            raise
        turn.thought, turn.pieces = reply.thought, reply.pieces
        turn.replies = [{"role": "assistant", "content": reply.text}]
        if not reply.token_ids:
            self.conversation.undo()
            notices.append(
                "stopped before the first word: the message is taken back, all is as before it"
            )
        reply.notices += said
        self._tell(reply, notices)
        return reply

    def again(self, text: str | None = None) -> Reply:
        """Replies anew to the last message, or to another text in its place, with a new seed.

        Raises ValueError where there is no message, and as `ask` does: then the old turn is back.
        """
        n_dropped = self.conversation.n_dropped
        old = self.conversation.undo()
        if old is None:
            raise ValueError("there is no message to reply to again")
        try:
            reply = self.ask(text or old.user, seed=secrets.randbits(32) if text is None else None)
        except BaseException:
            self.conversation.turns.append(old)
            self.conversation.n_dropped = n_dropped
            raise
        if not reply.token_ids:
            self.conversation.turns.append(old)
            self.conversation.n_dropped = n_dropped
            self.screen.state("the reply before is kept")
        return reply

    def _view(self) -> ScreenView | SilentView:
        if self.args.json:
            return SilentView()
        return ScreenView(self.screen, shows_thoughts=self.shows_thoughts)

    def _tell(self, reply: Reply, notices: list[str]) -> None:
        """What there is to say after a reply."""
        if not self.args.json:
            self.screen.reply("\n")
        if reply.finish_reason == "context_full":
            notices.append("the context is full: start a new conversation or pass a larger --ctx")
        if reply.thought and not reply.text:
            notices.append("the reply ended inside of its thought: --max-tokens may be too small")
        notices += self.engine.take_pressure_news()
        for line in notices:
            self.screen.state(line)
        reply.notices += notices
        self.stats = reply.stats
        if self.stats is not None:
            told = figures.status(
                self.stats,
                n_held=reply.n_held,
                n_ctx=self.engine.n_ctx,
                is_cut=reply.finish_reason == "length",
            )
            self.screen.state(told)

    # ------------------------------------------------------------ room

    def _prompt(self, say: Callable[[str], None]) -> tuple[list[int], bool]:
        """The prompt's tokens, and whether it has begun a thought; the oldest turns may go."""
        n_ctx = self.engine.n_ctx
        n_tokens = len(self._tokens(self.conversation.sent))
        if n_tokens > n_ctx - MIN_ROOM:
            self._drop(0, say)
        text = self.engine.render(self.conversation.sent)
        tokens = self.engine.tokenize(text, add_special=False)
        if len(tokens) > n_ctx and len(self.conversation.turns) > 1:
            raise ContextFullError(
                f"the conversation has {len(tokens)} tokens but the context holds {n_ctx}; "
                "/new begins another one, /undo takes a turn back, --ctx N makes room for more"
            )
        return tokens, text.rstrip().endswith(THINK)

    def _more_room(self, n_replied: int, notices: list[str]) -> list[int] | None:
        """A shorter prompt for a reply that has filled the context, or None."""
        if not self._drop(n_replied, notices.append):
            return None
        tokens = self._tokens(self.conversation.sent)
        return tokens if len(tokens) + n_replied <= self.engine.n_ctx - MIN_ROOM else None

    def _drop(self, n_replied: int, say: Callable[[str], None]) -> int:
        """Drops the oldest turns if it may; how many went."""
        if self.args.context == "stop":
            return 0
        most = int(KEPT_SHARE * self.engine.n_ctx)
        n_gone = self.conversation.make_room(
            lambda messages: len(self._tokens(messages)) + n_replied <= most
        )
        if n_gone:
            turns = "the oldest turn is" if n_gone == 1 else f"the {n_gone} oldest turns are"
            say(f"the context is full: {turns} not sent any more")
        return n_gone

    def _tokens(self, messages: list[Message]) -> list[int]:
        return self.engine.tokenize(self.engine.render(messages), add_special=False)

    # ------------------------------------------------------------ other models, other sessions

    def take_model(self, model: str) -> None:
        """Goes on with another model; the conversation stays.

        Raises as Engine does, and KeyboardInterrupt, with the model from before loaded again.
        """
        target_path(model)  # a name that nobody knows must not cost the present model
        self.engine.close()
        try:
            self.engine = _load_engine(self.args, model)
        except BaseException:  # Ctrl-C too
            self.engine = _load_engine(self.args, self.model)
            self._go_on()
            raise
        self.model = model
        self._go_on()

    def _go_on(self) -> None:
        """Takes over to a new engine what was switched meanwhile, or says that it has ended."""
        if self.speculation != self.args.speculation:
            try:
                self.engine.set_speculation(self.speculation)
            except ValueError as error:
                self.screen.state(f"/spec does not hold for this model: {error}")
        if self.trace:
            self.screen.state("the trace has ended with the model; /trace FILE begins another")
            self.trace = ""

    def save(self, name: str, *, with_cache: bool) -> list[str]:
        """Saves the session, and returns notices. Raises SessionError and ValueError."""
        notices = kept.save(
            name,
            self.conversation,
            self.params,
            seed=self.stats.seed if self.stats else None,
            engine=self.engine if with_cache else None,
        )
        self.session = name
        return notices

    def load(self, name: str, *, keeps_given: bool = False) -> list[str]:
        """Goes on with a saved session, and returns notices. Raises SessionError and ValueError.

        keeps_given: what the command line has of sampling and as system message holds before what
        the session has.
        """
        restored = kept.load(name, self.engine)
        notices = list(restored.notices)
        given = given_sampling(self.args) if keeps_given else {}
        kept_names = [key for key, value in given.items() if getattr(restored.params, key) != value]
        if kept_names:
            notices.append(f"of the command line, not of the session: {', '.join(kept_names)}")
        params = replace(restored.params, **given)
        if params != self.params:
            notices.append("sampling is the session's now; /set shows it")
        system = restored.conversation.system
        if keeps_given and self.args.system is not None and self.args.system != system:
            restored.conversation.system = self.args.system
            notices.append("the system message is the command line's, not the session's")
        self.conversation, self.params = restored.conversation, params
        self.stats, self.session = None, name
        return notices


def _load_engine(args: argparse.Namespace, model: str) -> Engine:
    """The engine for a model. Raises as Engine does."""
    check_ctx(args.ctx)
    check_threads(args.threads)
    drafter = drafter_for(args, model)
    engine = Engine(
        model,
        drafter=None if drafter == "none" else drafter,
        n_ctx=args.ctx,
        n_seq=1,
        n_gpu_layers=-1 if args.gpu_layers is None else args.gpu_layers,
        n_threads=args.threads,
        speculation=args.speculation,
    )
    if notice := gpu_notice(args.gpu_layers):
        engine.notices.append(notice)
    return engine
