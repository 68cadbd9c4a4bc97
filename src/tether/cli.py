"""The `tether` command: parse, build a config, call. Nothing else happens here."""

from __future__ import annotations

import errno
import importlib
import os
import select
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tether.errors import MissingDependencyError, TetherError, did_you_mean

Config = TypeVar("Config")

_FULL = (errno.ENOSPC, errno.EDQUOT)
# What stands between a command and its folder: the machine's business, so a message and no traceback.
_OF_THE_FOLDER = {
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Choose a folder you may write to."),
    **dict.fromkeys(_FULL, "Free space, or choose a folder on another disk."),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG), "Choose another path."),
}

_HELP = """\
usage: tether COMMAND ...

Trust regions for policy updates, from LLM tokens to robot trajectories.

  tether llm train             train a language model on a task
  tether llm eval              measure a model on held-out problems
  tether llm compare           train methods side by side, over a grid, with a report
  tether episodic train        learn a robot's motion; alone, the demo of a minute or two
  tether episodic eval RUN     measure a learned motion
  tether episodic render RUN   film it beside the untrained one
  tether episodic export RUN   observation to motion as torch and ONNX files, motions as CSV
  tether episodic compare      train several algorithms and seeds, with a report
  tether report RUN ...        one HTML report of any runs
  tether collect FOLDER ...    the numbers of finished runs as one table (CSV)
  tether verl --show           the one switch that puts TROLL into verl's trainers

Each command lists its options with --help and reads them from a file with --config FILE.yaml;
options typed besides the file override it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a Tether error becomes one message and exit code 1."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _let_waiting_threads_sleep()
    before = _take_signals()
    try:
        code = _run(arguments)
    except TetherError as error:
        print(f"tether: {error}", file=sys.stderr)
        code = 1
    except BrokenPipeError:
        if not _reader_has_gone(sys.stdout.fileno()):
            raise
        code = 128 + signal.SIGPIPE
    except OSError as error:
        # Only of a full disk is no more to be known: a write into a file that is open does not name it.
        if error.errno not in _OF_THE_FOLDER or (error.filename is None and error.errno not in _FULL):
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"tether: {where}{error.strerror}. {_OF_THE_FOLDER[error.errno]}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("tether: interrupted", file=sys.stderr)
        code = 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    sys.exit(code)


def _let_waiting_threads_sleep() -> None:
    """Threads of torch spin while they wait for each other, unless OpenMP is told otherwise before.

    Where another process wants the same cores, threads that spin make every step several times as long.
    """
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & set(os.environ)
    if not chosen and "torch" not in sys.modules:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def _take_signals() -> dict[int, Any]:
    """Handle what asks a command to end; what handled it before, by signal."""
    handlers: dict[int, Callable[[int, Any], None]] = {signal.SIGTERM: _terminated}
    hang_up = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
    if hang_up not in handlers and signal.getsignal(hang_up) != signal.SIG_IGN:  # as under nohup
        handlers[hang_up] = _hung_up
    return {number: signal.signal(number, handler) for number, handler in handlers.items()}


def _hung_up(number: int, frame: object) -> None:
    """Let a closed terminal end a command as SIGTERM does; the shell and the system may both tell of it."""
    signal.signal(number, signal.SIG_IGN)
    for output in (1, 2):  # a run says that it stops before it saves
        _reader_has_gone(output)
    signal.raise_signal(signal.SIGTERM)


def _terminated(number: int, frame: object) -> NoReturn:
    """End as Ctrl-C does: a command that has started others stops them, instead of leaving them behind."""
    raise SystemExit(128 + number)


def _reader_has_gone(output: int) -> bool:
    """Whether an output leads nowhere any more, since head has enough, say; then it is closed for good."""
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    # Whatever is still written would fail as well, with a traceback nobody needs.
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP)
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        from tether import __version__

        print(__version__)
        return 0
    words = arguments[:2] if arguments[0] in _GROUPS else arguments[:1]
    if arguments[0] in _GROUPS and words[1:] in ([], ["-h"], ["--help"], ["help"]):
        print(_HELP)
        return 0
    command = _COMMANDS.get(" ".join(words))
    if command is None:
        name = " ".join(words)
        meant = did_you_mean(name, _COMMANDS, likeness=0.75)
        print(f"tether: no command {name!r}.{meant}\n\n{_HELP}", file=sys.stderr)
        return 2
    try:
        command(arguments[len(words) :])
    except SystemExit as ending:
        _name_settings_files(arguments, ending.code)
        raise
    return 0


def _name_settings_files(arguments: list[str], code: object) -> None:
    """A refused value may come from a file, which the parser does not know of."""
    if code == 2 and (files := _settings_files(arguments)[0]):
        print(f"tether: options were also read from {', '.join(files)}", file=sys.stderr)


def _llm_train(arguments: list[str]) -> None:
    from tether.llm.config import TrainConfig

    config = _parse(TrainConfig, "tether llm train", arguments)
    from tether.llm.process import end_process_group, is_main_process
    from tether.llm.train import train

    run = train(config)
    end_process_group()
    if is_main_process():
        print(f"The run is in {run.path}. See it with: tether report {shlex.quote(str(run.path))}")


def _llm_eval(arguments: list[str]) -> None:
    from tether.llm.eval_config import EvalConfig

    config = _parse(EvalConfig, "tether llm eval", arguments)
    from tether.llm.evaluate import evaluate
    from tether.llm.evaluation_page import print_evaluation

    print_evaluation(config, evaluate(config))


def read_grid(file: str | Path, *typed: str) -> Any:
    """The comparison, a `CompareConfig`, that a settings file describes, with options typed besides it."""
    from tether.llm.compare_config import CompareConfig

    return _parse(CompareConfig, "tether llm compare", ["--config", str(file), *typed])


def _llm_compare(arguments: list[str]) -> None:
    from tether.llm.compare_config import CompareConfig

    config = _parse(CompareConfig, "tether llm compare", arguments)
    from tether.llm.compare import compare, report_comparison

    comparison = compare(config)
    page = report_comparison(config, comparison)
    if comparison.unfinished:
        print(f"\n{comparison.unfinished} runs are not finished; the same command goes on with them.")
    print(f"\nReport: {page.resolve().as_uri()}")


def _episodic(module: str) -> Any:
    """A module of `tether.episodic`, or an error that names the extra it needs."""
    try:
        return importlib.import_module(f"tether.episodic.{module}")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{error.name} is not installed. Robots need: pip install 'tether-rl[episodic]'."
        ) from error


def _episodic_train(arguments: list[str]) -> None:
    options, (written, typed) = _episodic("options"), _by_origin(arguments)
    defaults = options.defaults_for([*written, *typed])
    arguments = [*options.env_options_of(defaults, written), *written, *typed]
    config = _parse(options.TrainConfig, "tether episodic train", arguments, default=defaults)
    run = _episodic("commands").train_command(config)
    print(f"The run is in {run.path}, its pictures in {run.path / 'figures'}.")
    print(f"See it with: tether report {shlex.quote(str(run.path))}")


def _episodic_eval(arguments: list[str]) -> None:
    commands = _episodic("commands")
    config = _parse(_episodic("options").EvalConfig, "tether episodic eval", _run_first(arguments))
    commands.print_evaluation(commands.eval_command(config))


def _episodic_render(arguments: list[str]) -> None:
    config = _parse(_episodic("options").RenderConfig, "tether episodic render", _run_first(arguments))
    print(f"Film: {_episodic('commands').film_run(config).resolve().as_uri()}")


def _episodic_export(arguments: list[str]) -> None:
    config = _parse(_episodic("options").ExportConfig, "tether episodic export", _run_first(arguments))
    print(f"Written and compared with the run: {_episodic('export').export_run(config).resolve().as_uri()}")


def _episodic_compare(arguments: list[str]) -> None:
    config = _parse(_episodic("options").CompareConfig, "tether episodic compare", arguments)
    if config.queue is not None:
        print(f"Report: {_episodic('queue').queue_command(config).resolve().as_uri()}")
        return
    _report_on(_episodic("commands").compare_command(config), config.output / "report")


def _run_first(arguments: list[str]) -> list[str]:
    """Let the run's folder be typed without --run before it."""
    if arguments and not arguments[0].startswith("-"):
        return ["--run", *arguments]
    return arguments


def _report(arguments: list[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser(
        prog="tether report", description="Write one self-contained HTML report, and its plots, of runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=_RUNS)
    parser.add_argument("--output", type=Path, default=Path("report"), help="folder for report and plots")
    parser.add_argument("--title", help="headline of the report")
    options = parser.parse_args(arguments)
    _report_on(options.runs, options.output, options.title)


_RUNS = "run folders, folders of runs, or tables of them (study.csv, study.csv/GRID)"


def _report_on(paths: Sequence[Path], output: Path, title: str | None = None) -> None:
    from tether.experiments.report import write_report
    from tether.experiments.study_table import load_runs
    from tether.experiments.summary import print_results
    from tether.kinds import KINDS

    runs = load_runs(paths, KINDS)
    print_results(runs)
    page = write_report(runs, output, title=title)
    print(f"\nReport: {page.resolve().as_uri()}")


def _collect(arguments: list[str]) -> None:
    import argparse

    from tether.experiments.study_table import StudyTable, load_runs
    from tether.kinds import KINDS

    parser = argparse.ArgumentParser(
        prog="tether collect", description="Add the numbers of finished runs to one table for any program."
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a folder of runs: one grid")
    parser.add_argument("--output", type=Path, required=True, metavar="STUDY.csv", help="the table")
    parser.add_argument("--every-step", action="store_true", help="a row for each step, not each evaluation")
    parser.add_argument("--unfinished", action="store_true", help="take runs that were stopped early, too")
    options = parser.parse_args(arguments)
    table = StudyTable(options.output, KINDS)
    grids: dict[str, list[Path]] = {}
    for folder in options.folders:
        grids.setdefault(folder.resolve().name, []).append(folder)
    # Folders of one name at once: those added later would replace runs of the same name.
    for grid, folders in grids.items():
        runs = load_runs(folders, KINDS)
        table.add(grid, runs, every_step=options.every_step, unfinished=options.unfinished)
        print(f"{', '.join(map(str, folders))}: {len(runs)} runs are in {options.output}.")


def _verl(arguments: list[str]) -> None:
    import argparse

    from tether.integrations.verl_switch import describe

    parser = argparse.ArgumentParser(prog="tether verl", description="TROLL in verl's trainers.")
    parser.add_argument("--show", action="store_true", required=True, help="the switch and its settings")
    parser.parse_args(arguments)
    print(describe())


def _parse(config: type[Config], program: str, arguments: list[str], default: Any = None) -> Config:
    """Options to a config dataclass, those of a --config file first so that typed ones win."""
    try:
        import tyro
    except ImportError as error:
        raise MissingDependencyError(
            "The command line needs an extra: pip install 'tether-rl[llm]' for language models, "
            "'tether-rl[episodic]' for robots."
        ) from error
    from tether.experiments.settings_file import merged_mappings

    arguments = merged_mappings(_with_settings_file(arguments))
    from_options = getattr(config, "from_options", None)
    if from_options is not None:  # what options there are depends on others
        default, arguments = from_options(arguments)
    with _option_values():
        if default is None:
            return tyro.cli(config, prog=program, args=arguments)
        return tyro.cli(config, prog=program, args=arguments, default=default)


def _option_values() -> Any:
    """How the parser reads the values of free-form options: 007 and 2024_01_15 are no numbers."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    from tether.experiments.settings_file import OptionValue, read_option

    registry = ConstructorRegistry()
    spec = PrimitiveConstructorSpec(
        nargs=1,
        metavar="VALUE",
        instance_from_str=lambda words: read_option(words[0]),
        is_instance=lambda value: isinstance(value, OptionValue),
        str_from_instance=lambda value: [str(value)],
    )
    registry.primitive_rule(lambda info: spec if info.type == OptionValue else None)
    return registry


def _with_settings_file(arguments: list[str]) -> list[str]:
    """The options of --config files, then those typed."""
    written, typed = _by_origin(arguments)
    return written + typed


def _by_origin(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The options of --config files, and those typed."""
    from tether.experiments.settings_file import options_from_file

    files, typed = _settings_files(arguments)
    return [option for file in files for option in options_from_file(file)], typed


def _settings_files(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The files of --config FILE and --config=FILE, and all other arguments."""
    files: list[str] = []
    others: list[str] = []
    left = iter(arguments)
    for argument in left:
        option, equals, file = argument.partition("=")
        if option != "--config":
            others.append(argument)
            continue
        files.append(file if equals else next(left, ""))
        if not files[-1]:
            raise TetherError("--config needs a file name after it.")
    return files, others


_COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "llm train": _llm_train,
    "llm eval": _llm_eval,
    "llm compare": _llm_compare,
    "episodic train": _episodic_train,
    "episodic eval": _episodic_eval,
    "episodic render": _episodic_render,
    "episodic export": _episodic_export,
    "episodic compare": _episodic_compare,
    "report": _report,
    "collect": _collect,
    "verl": _verl,
}
_GROUPS = {name.split()[0] for name in _COMMANDS if " " in name}
