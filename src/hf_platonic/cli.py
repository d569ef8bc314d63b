"""The command line: parses, calls and prints."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import __version__
from .cli_verbs import add_verbs

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `hf-platonic` and returns its exit code: 0, 1 after an error, 2 for wrong arguments, 130 after Ctrl-C."""
    try:
        options = _parser().parse_args(arguments)
        with _heard():
            code: int = options.run(options)
        return code
    except KeyboardInterrupt:
        print("hf-platonic: interrupted; nothing was left half-written.", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"hf-platonic: {error}", file=sys.stderr)
        return 1


@contextmanager
def _heard() -> Iterator[None]:
    """Ctrl-C comes again where it fell into a `__del__` or another place whose exceptions Python drops."""
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Not from here, where it would be dropped as well.
            threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-platonic", description="Carry a fine-tune from one dual encoder to another, on unlabelled probes."
    )
    parser.add_argument("--version", action="version", version=f"hf-platonic {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="transfer, add and negate tasks between the models the package ships (no network, no training)",
        description="Transfer, add and negate tasks between the models the package ships. No network, no training.",
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    demo.add_argument("--out", type=Path, metavar="DIR", help="keep the saved descriptor and the merged checkpoint")
    demo.add_argument("--quiet", action="store_true", help="no progress bars")
    demo.set_defaults(run=_demo)
    bench = commands.add_parser(
        "benchmark",
        help="run a suite of models, tasks and methods, and write tables, figures and one page",
        description="Run a suite of models, tasks and methods; write results.json, tables, figures and one page. "
        "An interrupted run goes on where it stopped when the same command is given again.",
    )
    bench.add_argument("--suite", metavar="NAME|FILE", help="a shipped suite, or a YAML file (docs/suites.md)")
    bench.add_argument("--out", type=Path, metavar="DIR", help="folder of the run")
    bench.add_argument("--data", type=Path, metavar="DIR", help="folder with the suite's data folders")
    bench.add_argument("--models", type=Path, metavar="DIR", help="folder with the suite's model folders")
    bench.add_argument("--plugin", type=Path, metavar="FILE", help="Python file to run first; it registers families")
    bench.add_argument("--seeds", type=int, metavar="N", help="draw probes with this many seeds")
    bench.add_argument("--tasks", metavar="A,B", help="only these tasks")
    bench.add_argument("--processes", type=int, metavar="N", help="models measured at once (2 on a CPU, 1 on a GPU)")
    bench.add_argument("--dry-run", action="store_true", help="say what would be used, and about how long it takes")
    bench.add_argument("--report", type=Path, metavar="DIR", help="only draw the report of DIR/results.json again")
    bench.add_argument("--quiet", action="store_true", help="no progress bar")
    bench.set_defaults(run=_benchmark)
    add_verbs(commands)
    push = commands.add_parser("push", help="push a saved descriptor, bank, probe set or adapter to the Hub")
    push.add_argument("folder", type=Path)
    push.add_argument("repo_id")
    push.add_argument("--private", action="store_true", default=None, help="make a new repo private")
    push.add_argument("--revision", help="branch, made if missing")
    push.add_argument("--message", help="commit message")
    push.add_argument("--license", help="licence id for the card; otherwise the source's")
    push.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    push.set_defaults(run=_push)
    pull = commands.add_parser("pull", help="pull one from the Hub into an empty folder")
    pull.add_argument("repo_id")
    pull.add_argument("folder", type=Path)
    inspect = commands.add_parser("inspect", help="what a repo or a folder holds, and how to use it")
    inspect.add_argument("repo_or_folder")
    inspect.add_argument("--json", action="store_true", help="as JSON")
    for command in (pull, inspect):
        command.add_argument("--revision", help="branch, tag or commit")
        command.add_argument("--subfolder", help="folder within the repo")
        command.add_argument("--offline", action="store_true", help="only what is in the cache, without a request")
    pull.set_defaults(run=_pull)
    inspect.set_defaults(run=_inspect)
    return parser


def _benchmark(options: argparse.Namespace) -> int:
    from .benchmark import page, runs, suites
    from .benchmark.figures import require_matplotlib

    if options.report is not None:
        print(page.write_report(options.report))
        return 0
    if options.suite is None:
        raise ValueError(f"Expected --suite or --report, got neither. Shipped: {', '.join(suites.suite_names())}.")
    tasks = None if options.tasks is None else options.tasks.split(",")
    suite = runs.narrowed(suites.load_suite(options.suite), seeds=options.seeds, tasks=tasks)
    if options.dry_run:
        from .benchmark.plan import format_plan, plan

        print(format_plan(plan(suite)))
        return 0
    if options.out is None:
        raise ValueError("Expected --out, the folder to keep the run in, got none.")
    require_matplotlib()  # before hours are spent
    results = runs.run_benchmark(
        suite,
        options.out,
        data=options.data,
        models=options.models,
        plugin=options.plugin,
        processes=options.processes,
        progress=False if options.quiet else None,
    )
    path = page.write_report(options.out)
    print(page.headline(results))
    print(path)
    return 0


def _push(options: argparse.Namespace) -> int:
    from . import hub

    done = hub.push(
        options.folder,
        options.repo_id,
        private=options.private,
        revision=options.revision,
        commit_message=options.message,
        license=options.license,
        create_pr=options.create_pr,
    )
    print(done.pull_request or done.url)
    return 0


def _pull(options: argparse.Namespace) -> int:
    from . import hub

    found = hub.pull(options.repo_id, options.folder, **_where(options))
    print(f"{found.kind} at {found.revision or 'a local folder'} -> {options.folder}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from . import hub

    shown = hub.describe(options.repo_or_folder, **_where(options))
    if options.json:
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return 0
    for name, value in shown.items():
        lines = value if isinstance(value, list) else [value]
        print(f"{name:14}{lines[0] if lines else '-'}")
        for line in lines[1:]:
            print(f"{'':14}{line}")
    return 0


def _where(options: argparse.Namespace) -> dict[str, object]:
    return {"revision": options.revision, "subfolder": options.subfolder, "local_files_only": options.offline}


def _demo(options: argparse.Namespace) -> int:
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise OSError(f"Expected an existing folder for --json, got {options.json}. Make the folder first.")
    from ._files import write_atomic
    from .demo import format_report, run_demo

    report = run_demo(out=options.out, progress=False if options.quiet else None)
    print(format_report(report))
    if options.json is not None:
        text = json.dumps(report, indent=2) + "\n"
        write_atomic(options.json, lambda path: path.write_text(text, encoding="utf-8"))
    return 0
