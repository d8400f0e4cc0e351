"""The trainer's time: every stage of the chain by a clock that its work moves, and nothing else.

The machine is real and the pair tiny; only what the time costs is made up: so the tests hold on any
machine, however busy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tiny_models import TargetSpec, write_llama

from dspark_edge.distill import finish, parity, pipeline, sampling, train, trial
from dspark_edge.distill.options import Options
from dspark_edge.distill.pipeline import distill
from dspark_edge.distill.report import Facts
from dspark_edge.distill.settings import DataSettings, TrainSettings, shares_of
from dspark_edge.distill.train import Trainer

SHORT_S = 180.0
SLACK = 0.05  # of the time: what --hours may be passed by

# Seconds of each piece of work in a run of SHORT_S on a machine that can just do it.
COSTS = {
    "load": 1.5,
    "round": 0.3,
    "build": 4.0,
    "sequence": 0.4,
    "judge": 2.5,
    "checkpoint": 1.0,
    "export": 1.5,
    "block": 2.5,
    "text": 1.0,
    "reply": 1.0,
}


@dataclass(slots=True)
class Work:
    """The clock. scale: of all costs. ends: when each stage ended, in seconds."""

    patch: pytest.MonkeyPatch
    scale: float = 1.0
    seconds: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def now(self) -> float:
        return self.seconds

    def costs(self, owner: object, name: str, kind: str) -> None:
        """Each call takes its time."""
        does = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            self.seconds += self.scale * COSTS[kind]
            self.counts[kind] = self.counts.get(kind, 0) + 1
            return does(*args, **options)

        self.patch.setattr(owner, name, slow)

    def ends_stage(self, owner: object, name: str) -> None:
        """Each return ends a stage of this name."""
        does = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            result = does(*args, **options)
            self.ends[name] = self.seconds
            return result

        self.patch.setattr(owner, name, noted)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """All that takes long on a real machine takes time on this clock."""
    work = Work(monkeypatch)
    work.costs(pipeline, "Collector", "load")
    work.costs(sampling, "_round", "round")
    work.costs(pipeline, "new_drafter", "build")
    work.costs(train, "losses", "sequence")
    work.costs(train, "evaluate", "judge")
    work.costs(Trainer, "save", "checkpoint")
    work.costs(finish, "export", "export")
    work.costs(parity, "BlockDecoder", "load")
    work.costs(parity, "_draft", "block")
    work.costs(trial.Recorder, "conversation", "text")
    work.costs(trial, "Recorder", "load")
    work.costs(trial, "Engine", "load")
    work.costs(trial, "run_group", "reply")
    work.ends_stage(pipeline, "_collect")
    work.ends_stage(pipeline, "_train")
    work.ends_stage(finish, "_export")
    work.ends_stage(finish, "calibrate")
    work.ends_stage(finish, "measure")
    return work


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("target") / "t.gguf", TargetSpec(layer_gain=0.1))


def run(work: Work, target: Path, folder: Path, total_s: float) -> Facts:
    """The command with --hours, and no other limit."""
    work.scale = total_s / SHORT_S
    options = Options(
        target=target,
        out=folder / "d.gguf",
        work=folder / "work",
        hours=total_s / 3600.0,
        kind="f16",
        n_draft_max=256,
        rank=16,
        precision="float32",
        data=DataSettings(n_seq=32, max_prompt=64, max_reply=24),
        training=TrainSettings(checkpoint_s=0.05 * total_s),
    )
    return distill(options, now=work.now)


def limits(total_s: float) -> dict[str, float]:
    """Seconds by which each stage must have ended."""
    shares = shares_of(total_s)
    of_stage = {
        "_collect": shares.data,
        "_train": shares.train,
        "_export": shares.parity,
        "calibrate": shares.calibrate,
        "measure": shares.measure,
    }
    return {stage: (share + SLACK) * total_s for stage, share in of_stage.items()}


@pytest.mark.parametrize("total_s", [SHORT_S, 7200.0])
def test_every_stage_ends_in_its_time_on_a_machine_that_can_do_the_work(
    total_s: float, work: Work, target: Path, tmp_path: Path
) -> None:
    facts = run(work, target, tmp_path, total_s)
    for stage, latest in limits(total_s).items():
        assert work.ends[stage] <= latest, stage
    assert work.seconds <= (1.0 + SLACK) * total_s
    # The time is used, too.
    assert work.ends["_train"] > (shares_of(total_s).train - SLACK) * total_s
    assert work.counts["block"] >= parity.MIN_BLOCKS
    assert facts.n_anchors > 0


@pytest.mark.parametrize(("kind", "times"), [("block", 4.0), ("load", 5.0), ("text", 12.0)])
def test_what_is_far_slower_than_thought_costs_its_stage_and_no_more_time(
    kind: str,
    times: float,
    work: Work,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A target that is slow to load or to run: less is compared and measured."""
    monkeypatch.setitem(COSTS, kind, times * COSTS[kind])
    facts = run(work, target, tmp_path, SHORT_S)
    assert work.seconds <= (1.0 + SLACK) * SHORT_S
    if kind == "block":
        assert facts.parity.n_blocks == parity.MIN_BLOCKS
    assert facts.trial.calibrated is None
    assert facts.trial.notices == [trial.TOO_LATE]


def test_the_end_of_training_is_judged_once(work: Work, target: Path, tmp_path: Path) -> None:
    """A second look at the same weights would give the same, and costs minutes of a large one."""
    facts = run(work, target, tmp_path, SHORT_S)
    assert work.counts["judge"] == len(facts.curve)
    assert facts.acceptance.greedy_tau == facts.curve[-1].greedy_tau


def test_a_run_without_time_to_train_says_so(work: Work, target: Path, tmp_path: Path) -> None:
    work.patch.setitem(COSTS, "build", 200.0)
    with pytest.raises(ValueError, match="no time was left to train in; give more --hours"):
        run(work, target, tmp_path, SHORT_S)


@pytest.mark.parametrize(
    ("total_s", "train"), [(60.0, 0.7), (180.0, 0.7), (600.0, 0.8), (7200.0, 0.93)]
)
def test_the_end_has_two_minutes_where_that_is_less_than_a_third(
    total_s: float, train: float
) -> None:
    shares = shares_of(total_s)
    assert shares.train == pytest.approx(train)
    in_order = [shares.data, shares.train, shares.parity, shares.calibrate, shares.measure, 1.0]
    assert in_order == sorted(set(in_order))
