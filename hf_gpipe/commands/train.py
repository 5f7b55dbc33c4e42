"""hf-gpipe train recipe.yaml [key=value ...]: trains, evaluates and saves; resumes when started again."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_gpipe.commands.base import fail, flushed, loading
from hf_gpipe.errors import EXIT_STOPPED, RecipeError, UserError
from hf_gpipe.job.started import has_group, note_launcher
from hf_gpipe.recipe import Recipe, load_recipe, recipe_help, section_help
from hf_gpipe.settings.pipeline import OF_EACH_PROCESS

#: In the output directory of a run that a signal has stopped: start it again to go on. torchrun hides exit codes.
STOPPED_FILE = "stopped"
#: Processes that are started on this machine at most: a mistyped number must not make thousands of them.
_MOST_PROCESSES = 1024
#: Before more are started, this process checks model and data. Otherwise they do so, and nobody waits twice for
#: the import of transformers.
_FEW_PROCESSES = 8

USAGE = """\
usage: hf-gpipe train recipe.yaml [key=value ...]
       hf-gpipe train --help [section]

Trains the model of a recipe in stages, evaluates it, and saves a checkpoint that plain transformers loads.

The command starts the processes of the stages on this machine. Under torchrun, `accelerate launch` or srun, and in a
process group that exists already, it uses their processes. If you run it again with the same output directory, it
resumes from the newest valid checkpoint. On SIGTERM or SIGINT it finishes its step, saves, and exits with code 75; on a
second signal it exits at once.

  recipe.yaml     a YAML file; with `extends: base.yaml` it takes all other values from the file base.yaml beside it
  key=value       replaces a value of the recipe, such as training.max_steps=100; the value is YAML
  --help section  every key of a section, with what it allows, its default and its meaning

{recipe}

examples:
  hf-gpipe train recipes/quickstart.yaml
  hf-gpipe train recipes/quickstart.yaml pipeline.num_stages=4 training.max_steps=200
  hf-gpipe train recipes/causal/lora.yaml data.path=chats.jsonl model.path=Qwen/Qwen2.5-14B-Instruct
  hf-gpipe train recipes/causal/pretrain.yaml data.path='my/text/*.txt' data.subset=null
  torchrun --nproc-per-node 4 -m hf_gpipe.train recipes/quickstart.yaml pipeline.num_stages=4

docs/recipes.md explains recipes and lists those that are shipped, docs/data.md the kinds of data, docs/clusters.md
several machines. `hf-gpipe plan` says what a recipe needs, `hf-gpipe check` whether its model is exact in stages, and
`hf-gpipe launch` prints the file that starts it on several machines.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Its exit code: 0; 1 for a failure; 2 for an error that the user can correct; 75 if SIGTERM or SIGINT stopped
        the training after a checkpoint was saved, so that the same command resumes it; 128 plus the number of a signal
        that ended it without saving.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args:
        _print_help([])
        return 2
    if asked := [place for place, arg in enumerate(args) if arg in ("-h", "--help")]:
        return _print_help(args[asked[0] + 1 :])
    _be_quiet()
    note_launcher()
    try:
        recipe = load_recipe(args[0], args[1:])
        if "HF_GPIPE_LAUNCHER_PID" in os.environ:  # this command has started the process
            # Until there is something to save, the launcher's word ends this process without one of its own.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            return _work(recipe)
        _check(recipe)
        num_processes = recipe.pipeline.division.num_ranks * _num_workers(recipe)
        if "RANK" in os.environ or num_processes == 1:
            return _work(recipe)
        if num_processes > _FEW_PROCESSES:
            from hf_gpipe.from_recipe.job import check_recipe

            _hide_bars()
            check_recipe(recipe)
        from hf_gpipe.job.launch import launch
        from hf_gpipe.job.signals import StopSignal

        return launch(
            "hf_gpipe.train",
            args,
            num_processes,
            _traceback_file(recipe),
            threads=recipe.pipeline.threads_per_process,
            stop=StopSignal(recipe.training.stop_seconds),
        )
    except UserError as error:
        return _fail(error)


def _print_help(sections: Sequence[str]) -> int:
    """Print the help of some sections, or the page on all; returns the exit code."""
    try:
        text = "\n\n".join(map(section_help, sections)) or USAGE.format(recipe=recipe_help()).rstrip()
    except UserError as error:
        return _fail(error)
    return flushed(lambda: sys.stdout.write(f"{text}\n") and 0)


def _work(recipe: Recipe) -> int:
    """This process's part of the job."""
    from hf_gpipe.job import failures
    from hf_gpipe.job.agreement import compare
    from hf_gpipe.job.job import in_job
    from hf_gpipe.job.joining import join_job

    is_guest = has_group()
    try:
        with loading():
            from hf_gpipe.checkpoint.save import writing
            from hf_gpipe.from_recipe.job import run
            from hf_gpipe.training.stopping import TrainingStopped

        _hide_bars()
        job = join_job(recipe.pipeline.timeout_seconds, recipe.pipeline.threads_per_process)
        compare(lambda: _settings(recipe), "the recipe")
        code = 0
        try:
            run(recipe, job)
        except TrainingStopped as stopped:
            code = EXIT_STOPPED
            if os.environ.get("RANK", "0") == "0":
                with writing(_stopped_file(recipe)):
                    _stopped_file(recipe).write_text(f"after step {stopped.step}: {stopped.checkpoint}\n")
        if not is_guest:
            job.leave()
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return 130
    except Exception as error:
        code = failures.report(error, _traceback_file(recipe))
        if in_job() and not is_guest:
            # The end of the interpreter would wait for messages that no one answers any more.
            sys.stdout.flush()
            os._exit(code)
    return code


def _check(recipe: Recipe) -> None:
    """Find what is wrong and can be told without transformers, whose import takes seconds. Raises UserError."""
    import torch

    # They may be left from an earlier run. A name that no file can have is told with the other files.
    for file in (_traceback_file(recipe), _stopped_file(recipe)):
        with suppress(OSError, ValueError):
            file.unlink()
    if recipe.pipeline.device == "cuda" and not torch.cuda.is_available():
        raise RecipeError("pipeline.device is cuda and torch finds no GPU; use auto or cpu")
    if "RANK" not in os.environ:
        # In another launcher's job the main process reads it.
        recipe.table(_num_workers(recipe))
    size = recipe.training.size
    recipe.pipeline.check_micro_batches(size.accumulation, size.known_rows)


def _num_workers(recipe: Recipe) -> int:
    """The number of workers that share the stages: that of the recipe, or one per stage, but at most one per GPU.

    Where layers are divided, each is several processes.

    Where the planner chooses stages or replicas, it does so in these processes, for their number: that of the recipe,
    or one for each device.

    Raises:
        UserError: the launcher started another number, there are not enough GPUs, or neither recipe nor devices say how
            many processes there are.
    """
    import torch

    pipeline = recipe.pipeline
    asked = pipeline.num_processes
    if "RANK" in os.environ:
        started = pipeline.division.workers_among(int(os.environ.get("WORLD_SIZE", "1")))
        if asked not in (None, started):
            raise RecipeError(
                f"pipeline.num_processes is {asked} and the launcher started {started}; leave it out, or start {asked}"
            )
        return started
    if pipeline.devices is not None:
        num_devices = pipeline.division.workers_among(len(pipeline.devices))
        count = asked or (num_devices if pipeline.is_mesh_open else min(pipeline.processes, num_devices))
        if num_devices % count:
            raise RecipeError(
                f"pipeline.devices {list(pipeline.devices)} cannot be shared out evenly between {count} processes; "
                "give the same number of devices to each"
            )
        return count
    if pipeline.device == "cpu" or not torch.cuda.is_available():
        if pipeline.processes > _MOST_PROCESSES:
            raise RecipeError(
                f"pipeline.num_processes is {pipeline.processes}, or one for each stage and replica, and at most "
                f"{_MOST_PROCESSES} are started on one machine; give fewer, or fewer pipeline.num_stages"
            )
        return pipeline.processes
    most = pipeline.division.workers_on(torch.cuda.device_count())
    if asked is not None and asked > most:
        raise RecipeError(
            f"pipeline.num_processes is {asked} and this machine has {torch.cuda.device_count()} GPUs; each takes "
            f"{pipeline.division.num_ranks}: use {most} or fewer (several stages share a process), or "
            "pipeline.device=cpu"
        )
    return asked or (most if pipeline.is_mesh_open else min(pipeline.processes, most))


def _fail(error: UserError) -> int:
    if "RANK" in os.environ:
        from hf_gpipe.job import failures

        return failures.report(error)
    return fail(error)


def _traceback_file(recipe: Recipe) -> Path:
    return Path(recipe.training.output_dir) / "error.txt"


def _stopped_file(recipe: Recipe) -> Path:
    return Path(recipe.training.output_dir) / STOPPED_FILE


def _settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values that must be the same in every process, by their keys. Devices may differ."""
    own = {("pipeline", name) for name in OF_EACH_PROCESS}
    return {".".join(key): value for key, value in recipe.values().items() if key not in own}


def _hide_bars() -> None:
    """Turn off the libraries' bars, which every process would show for every small file. Downloads have their own."""
    import transformers

    transformers.logging.disable_progress_bar()


def _be_quiet() -> None:
    """Silence other packages on the terminal. Must be called before torch and transformers are imported."""
    for name, value in {"TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore")
    # What this package has to tell goes to stderr; other packages' messages do not.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    own = logging.getLogger("hf_gpipe")
    own.handlers = [handler]
    own.propagate = False
    logging.getLogger().addHandler(logging.NullHandler())
