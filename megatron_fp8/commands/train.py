"""The command that trains, and validates a config: `pretrain.py CONFIG ...`, `megatron-fp8 train CONFIG ...`.

Parses and validates before torch is imported; any mistake ends every rank with exit code 2, and rank 0 reports all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_fp8.checkpoint.resume import choose_start
from megatron_fp8.commands.rank_zero_output import RankZeroOutput
from megatron_fp8.commands.train_options import (
    UsageError,
    describe_world_sizes,
    hint_for_option,
    make_parser,
    summarize,
)
from megatron_fp8.config.check import DataReport, check_config
from megatron_fp8.config.config_warnings import config_warnings
from megatron_fp8.config.environment import (
    DETERMINISTIC,
    ENVIRONMENT,
    foreign_tasks,
    overruled,
    run_variables,
    secret_problems,
    undone_by_job,
)
from megatron_fp8.config.layout import Layout, derive_layout
from megatron_fp8.config.limits import MAX_RANKS
from megatron_fp8.config.load import LoadedConfig, dump_config, load_config, process_environment
from megatron_fp8.config.paths import is_missing
from megatron_fp8.config.places import place_problems, problems_in_run, refusal_of_start
from megatron_fp8.config.problem import ConfigError, Problem, show_value
from megatron_fp8.config.resume_check import compare_with_saved
from megatron_fp8.config.rules_run import MODE as WANDB_MODE
from megatron_fp8.config.rules_run import login_problem
from megatron_fp8.config.run_start import (
    LENGTH_KEYS,
    Start,
    make_run_directory_for_all,
    reopen_run_directory,
    resolve_length,
    resolve_run_directory,
)
from megatron_fp8.config.schema import Config
from megatron_fp8.data.check_data import check_data
from megatron_fp8.errors import BadInputError
from megatron_fp8.faults.run_lock import Holds
from megatron_fp8.parallel.process_environment import set_variables
from megatron_fp8.report.start_clock import StartClock

RUN_ROOT = "run.root"
# Where what a run starts from is looked for.
_PLACES_OF_START = {RUN_ROOT, "checkpoint.load"}
_MAX_DIGITS = 20

DataCheck = Callable[[Config], DataReport]
ChosenStart = Callable[[], Start]


@dataclass(frozen=True)
class Command:
    """A command line that was understood and found right.

    `origins`: where each dotted key's value comes from. `vocab_size`: tokens of the tokenizer, before padding.
    `start`: what the run starts from. Where that is a checkpoint, rank 0 alone chooses it, and the others have to be
    told, also of its config: the length may depend on the choice. `data_notes`: what a check should say about the files
    of data. `quiet`: whether the console is to show warnings and errors alone.
    """

    config: Config
    origins: Mapping[str, str]
    vocab_size: int
    start: Start
    data_notes: tuple[str, ...] = ()
    quiet: bool = False


Checked = tuple[Command, Layout | None]  # None without a world size


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as `arguments` (default: the command line) say."""
    clock = StartClock()
    holds = Holds()
    command = parse_command_line(sys.argv[1:] if arguments is None else arguments, process_environment(), holds)
    set_variables(run_variables(command.config))
    clock.end_part("config")
    from megatron_fp8.faults.exit_codes import ExitCode
    from megatron_fp8.faults.failure_report import run_reporting
    from megatron_fp8.parallel.process_group import global_rank
    from megatron_fp8.train.job import run_job

    job = partial(run_job, command.config, command.vocab_size, command.start, holds, clock, command.quiet)
    if run_reporting(job, global_rank()).stopped is not None:
        sys.exit(ExitCode.STOPPED)


def parse_command_line(
    argv: Sequence[str],
    environ: Mapping[str, str],
    holds: Holds | None = None,
    check_data: DataCheck = check_data,
) -> Command:
    """The validated config that `argv` (without the program's name) asks to train with.

    `environ`: `RANK` and `WORLD_SIZE` as torchrun sets them; rank 0 writes messages, to standard error.
    `holds`: what a run keeps other jobs from changing once it has chosen a checkpoint; `--check` holds nothing.
    `check_data`: validates the config's data files.
    Exits: with code 0 after `--help`, `--print-config`, `--plan` and `--check`, with code 2 after any mistake.
    """
    tasks = foreign_tasks(environ)
    output = RankZeroOutput(environ if tasks is None else {**environ, "RANK": str(tasks.rank)})
    try:
        arguments = _parse(argv)
        if arguments.help:
            output.exit_with_answer(make_parser().format_help())
        if tasks is not None and not (arguments.check or arguments.plan or arguments.print_config):
            raise UsageError(tasks.text)
        world_size = _world_size(arguments, environ)
        loaded = load_config(arguments.config, arguments.overrides)
        if arguments.print_config:
            answer = dump_config(loaded.config, loaded.origins)
            if not arguments.check and not arguments.plan:
                output.exit_with_answer(answer)
            output.answer(answer)
        if arguments.plan:
            # Its tables take a tenth of a second to import.
            from megatron_fp8.planner.plan_report import describe_plan

            answer, warnings = describe_plan(loaded, world_size, check_data)
            for warning in warnings:
                output.warn(str(warning))
            output.exit_with_answer(answer)
        login = login_problem(loaded.config, environ, loaded.origins[WANDB_MODE])
        of_environment = [*([login] if login else []), *secret_problems(loaded.config, environ, loaded.origins)]
        of_environment = place_problems(loaded.config, environ.get("RANK", "0") == "0") + of_environment
        of_environment += undone_by_job(loaded.config, environ, loaded.origins[DETERMINISTIC])
        look = partial(choose_start, loaded.config, arguments.resume)
        check = partial(_check, loaded, world_size, check_data, of_environment)
        from_checkpoint = arguments.resume is not None or loaded.config.checkpoint.load is not None
        if arguments.check or not from_checkpoint:
            command, layout = check(partial(look, None))
        elif output.is_rank_zero:
            command, layout = _claimed(partial(check, partial(look, holds)), holds)
        else:
            command, layout = check(None)
    except (UsageError, BadInputError) as error:
        output.exit_with_error(str(error))
    if arguments.check or not _continues_unchanged(command, world_size):
        for warning in config_warnings(replace(loaded, config=command.config, origins=command.origins), layout):
            output.warn(str(warning))
    for conflict in overruled(command.config.parallel, environ, command.origins[ENVIRONMENT]):
        output.warn(str(conflict))
    for note in command.start.notes:
        output.warn(note)
    if arguments.check:
        output.exit_with_answer(_what_would_run(command, layout))
    return replace(command, quiet=arguments.quiet)


def _continues_unchanged(command: Command, world_size: int | None) -> bool:
    """Whether this resumes a run with the config and ranks of its checkpoint, whose start has printed the warnings."""
    start = command.start
    same = start.saved_config == dump_config(command.config) and start.saved_world_size == world_size
    return same and start.run_directory is not None


def _what_would_run(command: Command, layout: Layout | None) -> str:
    config, start = command.config, command.start
    lines = [describe_world_sizes(config) if layout is None else summarize(config, layout)]
    lines += [f"  data       {note}" for note in command.data_notes]
    if start.is_finished(config.training.train_iters):
        lines.append(f"  start      {start.finished(config.training.train_iters)}")
    return "\n".join([*lines, ""])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    # An option with an optional value would take the override that comes after it for its value.
    argv = ["--resume-auto" if argument == "--resume=auto" else argument for argument in argv]
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if arguments.help:
        return arguments
    if unknown:
        parser.error(f"unknown option {unknown[0]}; use {hint_for_option(unknown[0])}")
    if arguments.config is None:
        parser.error("CONFIG is missing: the path of a YAML file, such as configs/quickstart.yaml")
    if "=" in arguments.config and is_missing(arguments.config):
        parser.error(f"CONFIG must come first, and {arguments.config} is not the path of a YAML file")
    if arguments.check and arguments.plan:
        parser.error("--check and --plan exclude each other")
    if arguments.world_size is not None and not (arguments.check or arguments.plan):
        parser.error("--world-size requires --check or --plan; a run has as many ranks as torchrun starts")
    return arguments


def _world_size(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int | None:
    """Ranks of the job; None when `--check` or `--plan` was not told. Without a launcher a run has one rank."""
    size: int
    if arguments.world_size is not None:
        size, name = arguments.world_size, "--world-size"
    elif "WORLD_SIZE" in environ:
        text, name = environ["WORLD_SIZE"], "the environment variable WORLD_SIZE"
        size = int(text) if text.isdecimal() and len(text) < _MAX_DIGITS else 0
    else:
        return None if arguments.check or arguments.plan else 1
    if not 1 <= size <= MAX_RANKS:
        raise UsageError(f"{name} is not a number of ranks, 1 to {MAX_RANKS:,}")
    return size


def _check(
    loaded: LoadedConfig,
    world_size: int | None,
    check_data: DataCheck,
    of_environment: Sequence[Problem],
    choose_start: ChosenStart | None,
) -> Checked:
    """The command and its layout (None without a world size). Raises ConfigError with every mistake.

    `choose_start` None: another rank chooses, and judges what depends on the choice.
    """
    report = check_data(loaded.config)
    refused = {problem.key for problem in of_environment}
    start, mistakes_of_start = Start(), list[Problem]()
    if choose_start is not None and not refused & _PLACES_OF_START:
        start, mistakes_of_start = _chosen(choose_start, loaded.config)
    loaded, problems = resolve_length(loaded, report.epoch_samples, start.position)
    problems += check_config(loaded, world_size, report.vocab_size, start.position)
    if choose_start is None:
        problems = [problem for problem in problems if problem.key not in LENGTH_KEYS]
    elif not mistakes_of_start and RUN_ROOT not in refused:
        start, mistakes_of_start = _ready(loaded.config, start)
    problems += [*report.problems, *mistakes_of_start]
    # Whose place is refused has been named, and those who could not read it would name it again.
    named = {(problem.key, show_value(problem.value)) for problem in of_environment}
    problems = [*of_environment, *(item for item in problems if (item.key, show_value(item.value)) not in named)]
    problems = [_with_origin(problem, loaded) for problem in problems]
    if problems:
        raise ConfigError.from_problems(problems)
    # No problem, so a tokenizer was read.
    assert report.vocab_size is not None
    command = Command(loaded.config, loaded.origins, report.vocab_size, start, report.notes)
    layout = None if world_size is None else derive_layout(loaded.config, world_size, report.vocab_size)
    return command, layout


def _claimed(check: Callable[[], Checked], holds: Holds | None) -> Checked:
    """What `check` gives once this process holds the directory of the run that it continues, or begins for another."""
    command, layout = check()
    start = command.start
    if holds is None or start.run_directory is not None or start.checkpoint is not None:
        return command, layout
    # Of several jobs that find no directory one begins the run; the others wait, and find what it has left.
    make_run_directory_for_all(command.config)
    return check()


def _chosen(choose_start: ChosenStart, config: Config) -> tuple[Start, list[Problem]]:
    """What the run starts from, or what is wrong with that."""
    try:
        return choose_start(), []
    except ConfigError as error:
        return Start(), list(error.problems)
    except OSError as error:
        return Start(), [refusal_of_start(config, error)]


def _ready(config: Config, start: Start) -> tuple[Start, list[Problem]]:
    """`start` with a directory to write into and what a person should know, and what is wrong with it for `config`."""
    notes: list[str] = []
    problems: list[Problem] = []
    if start.saved_config is not None:
        problems, notes = compare_with_saved(config, start.saved_config, start.weights_only, start.position)
    try:
        if start.run_directory is None:
            directory = resolve_run_directory(config)
        else:
            directory = reopen_run_directory(start.run_directory)
        problems += problems_in_run(config, directory)
    except ConfigError as error:
        problems += error.problems
    return replace(start, notes=(*start.notes, *notes)), problems


def _with_origin(problem: Problem, loaded: LoadedConfig) -> Problem:
    return replace(problem, origin=problem.origin or loaded.origins.get(problem.key, ""))
