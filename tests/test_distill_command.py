"""The trainer's command around the chain: one process per work folder, and the user's own chats."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dspark_edge import DsparkError, ModelError
from dspark_edge.distill import __main__ as command
from dspark_edge.distill.lock import alone_in
from dspark_edge.distill.my_chats import read_chats
from dspark_edge.distill.options import Options
from dspark_edge.distill.pipeline import distill
from dspark_edge.distill.settings import DataSettings
from dspark_edge.lookup_cache import lookup_cache_path
from dspark_edge.sessions import Session, SessionStore

SECRET = "what did the doctor say about Aloysius"
HOLD = """
import sys, time
from pathlib import Path
from dspark_edge.distill.lock import alone_in
with alone_in(Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(600)
"""


def tiny_options(target: Path, folder: Path) -> Options:
    return Options(
        target=target,
        out=folder / "d.gguf",
        work=folder / "d.work",
        hours=1.0,
        kind="f16",
        n_draft_max=256,
        rank=32,
        max_sequences=6,
        max_steps=1,
        n_trial_prompts=1,
        data=DataSettings(n_seq=4, max_prompt=128, max_reply=16),
    )


# ---------------------------------------------------------------- the lock


def test_a_second_process_is_kept_out_until_the_first_is_gone_even_killed(tmp_path: Path) -> None:
    """Two writers would mix their shards; a lock that outlives its holder would block for ever."""
    work = tmp_path / "work"
    line = [sys.executable, "-c", HOLD, str(work)]
    first = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "in\n"
        with pytest.raises(DsparkError) as error, alone_in(work):
            pass
        assert str(error.value) == (
            f"{work} is in use by another process; wait for it, stop it, or give another --work"
        )
    finally:
        first.kill()
        first.wait()
        if first.stdout is not None:
            first.stdout.close()
    with alone_in(work):
        pass
    with alone_in(work):
        pass


def test_the_chain_runs_under_the_lock(tiny_llama: Path, tmp_path: Path) -> None:
    options = tiny_options(tiny_llama, tmp_path)
    with alone_in(options.work), pytest.raises(DsparkError, match="in use by another process"):
        distill(options)
    assert os.listdir(options.work) == ["lock"]


def test_a_start_that_does_not_fit_is_refused_before_anything_is_sampled(
    tiny_llama: Path, tmp_path: Path
) -> None:
    options = replace(tiny_options(tiny_llama, tmp_path), start=tiny_llama)
    with pytest.raises(ModelError, match="llama, but dflash is to be trained"):
        distill(options)
    assert not (options.work / "shards").exists()


def test_a_start_says_which_layers_are_read(tiny_llama: Path, tmp_path: Path) -> None:
    first = replace(tiny_options(tiny_llama, tmp_path / "first"), taps=(1, 2))
    distill(first)
    second = replace(tiny_options(tiny_llama, tmp_path / "second"), start=first.out)
    assert distill(second).shape.taps == (1, 2)
    with pytest.raises(ModelError, match="target_layers"):
        distill(replace(second, taps=(1, 3)))


def test_given_prompts_that_are_too_long_are_told(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = tiny_options(tiny_llama, tmp_path)
    alone = replace(options.data, drawn_share=0.0)
    with pytest.raises(ValueError, match="1 of 1 given prompts are longer than 128 tokens; give"):
        distill(replace(options, given=["x" * 500], data=alone))
    distill(replace(options, given=["x" * 500, "short", "another"], data=alone))
    assert "1 of 3 given prompts are longer than 128 tokens and left out" in capsys.readouterr().err


def test_replies_to_a_single_prompt_are_too_little(tiny_llama: Path, tmp_path: Path) -> None:
    options = tiny_options(tiny_llama, tmp_path)
    alone = replace(options.data, drawn_share=0.0)
    with pytest.raises(ValueError, match="held out for judging; sample more, or give more prompts"):
        distill(replace(options, given=["the only one"], data=alone))


def test_what_is_finished_stays_as_it_is(tiny_llama: Path, tmp_path: Path) -> None:
    options = tiny_options(tiny_llama, tmp_path)
    distill(options)
    before = options.out.with_suffix(".md").read_bytes()
    (options.work / "clock.json").write_text('{"spent_s": 3500.0}')
    with pytest.raises(ValueError, match=r"d\.gguf is finished; give more --hours"):
        distill(options)
    assert options.out.with_suffix(".md").read_bytes() == before
    distill(replace(options, hours=2.0, max_steps=2))
    assert options.out.with_suffix(".md").read_bytes() != before


def test_a_checkpoint_of_another_draft_vocabulary_is_refused(
    tiny_llama: Path, tmp_path: Path
) -> None:
    options = tiny_options(tiny_llama, tmp_path)
    distill(options)
    with pytest.raises(ValueError, match="begun with another draft vocabulary; give the same"):
        distill(replace(options, n_draft_max=100, max_steps=2))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--drawn-share", "1.5"], "--drawn-share is 1.5; it must be from 0 to 1"),
        (["--drawn-share", "nan"], "--drawn-share is nan"),
        (["--temperatures", "0", "-1"], "--temperatures has -1"),
        (["--temperatures", "inf"], "--temperatures has inf"),
    ],
)
def test_how_text_is_drawn_is_checked_at_once(
    flags: list[str],
    words: str,
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["--target", str(tiny_llama), "--out", str(tmp_path / "d.gguf"), *flags]
    assert command.main(line) == 1
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- --my-chats


def kept_sessions(folder: Path) -> SessionStore:
    store = SessionStore(folder)
    store.save(
        "one",
        Session(
            messages=[
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": f"  {SECRET} \n"},
                {"role": "assistant", "content": "nothing new"},
                {"role": "user", "content": "and then?"},
            ]
        ),
    )
    parts = [{"type": "text", "text": "look"}, {"type": "image_url"}, {"type": "text", "text": "!"}]
    store.save(
        "two",
        Session(
            messages=[
                {"role": "user", "content": "and then?"},
                {"role": "user", "content": parts},
                {"role": "user", "content": " "},
            ]
        ),
    )
    store.save("broken", Session(messages=[]))
    (folder / "broken" / "session.json").write_text("{half")
    return store


def test_the_users_turns_are_read_once_each_and_broken_sessions_named(tmp_path: Path) -> None:
    chats = read_chats(kept_sessions(tmp_path))
    assert sorted(chats.turns) == sorted([SECRET, "and then?", "look\n!"])
    assert chats.n_sessions == 2
    (line,) = chats.unread
    assert line.startswith("session 'broken' cannot be read")
    assert read_chats(SessionStore(tmp_path / "nowhere")).turns == []


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_chats_are_read_only_when_asked_for(
    is_asked_for: bool,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = kept_sessions(tmp_path / "sessions")
    monkeypatch.setattr(command, "SessionStore", lambda: store)
    asked: list[Options] = []
    monkeypatch.setattr("dspark_edge.distill.pipeline.distill", asked.append)
    line = ["--target", str(tiny_llama), "--out", str(tmp_path / "d.gguf")]
    assert command.main(line + ["--my-chats"] * is_asked_for) == 0
    assert (SECRET in asked[0].given) == is_asked_for
    assert asked[0].from_chats == is_asked_for
    said = capsys.readouterr().err
    assert ("3 different turns of yours in 2 sessions" in said) == is_asked_for
    assert ("left out: session 'broken'" in said) == is_asked_for


def test_nothing_that_was_given_is_named_in_what_is_made(tiny_llama: Path, tmp_path: Path) -> None:
    """A drafter may be passed on; what its maker wrote may not be."""
    made = tmp_path / "made"
    options = replace(tiny_options(tiny_llama, made), given=[SECRET], work=tmp_path / "work")
    distill(options)
    files = [path for path in made.rglob("*") if path.is_file()]
    assert options.out in files
    for path in files:
        content = path.read_bytes()
        assert SECRET.encode() not in content
        assert b"Aloysius" not in content


def test_replies_to_chats_are_in_no_lookup_cache_then_or_later(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """They say what the chats are about; the work folder has them in later runs too."""
    made = tmp_path / "made"
    options = replace(tiny_options(tiny_llama, made), given=[SECRET], from_chats=True)
    made.mkdir()
    beside = lookup_cache_path(options.out)
    beside.write_bytes(b"of an older drafter")
    assert distill(options).looked_up == (
        "none, as it would, or might, hold the replies to what you wrote in your chats"
    )
    assert not beside.exists()
    (options.work / "finished").unlink()
    distill(replace(options, from_chats=False))
    assert not beside.exists()


def test_where_it_is_not_known_whether_chats_were_used_there_is_no_lookup_cache(
    tiny_llama: Path, tmp_path: Path
) -> None:
    options = tiny_options(tiny_llama, tmp_path)
    distill(options)
    assert lookup_cache_path(options.out).exists()
    (options.work / "no-chats").unlink()  # as in work folders from before there was one
    (options.work / "finished").unlink()
    assert "or might" in str(distill(options).looked_up)
    assert not lookup_cache_path(options.out).exists()
