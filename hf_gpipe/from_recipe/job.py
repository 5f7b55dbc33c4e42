"""The job of `hf-gpipe train`, run by every process of the pipeline: train, evaluate, save, summarise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_gpipe.checkpoint.directory import check_shared, checkpoints, last_checkpoint, step_of, tidy
from hf_gpipe.checkpoint.lock import owned
from hf_gpipe.checkpoint.save import make_directory, remove, replace_file, writing
from hf_gpipe.checkpoint.state import read_state
from hf_gpipe.data.files import check_files, digest_of_files
from hf_gpipe.errors import DataError, RecipeError
from hf_gpipe.from_recipe import summary
from hf_gpipe.from_recipe.checks import check_model, loss_of, workload_of
from hf_gpipe.from_recipe.cost import CostMeter
from hf_gpipe.from_recipe.model import companion_of, model_config, spec_of
from hf_gpipe.from_recipe.page import run_page
from hf_gpipe.from_recipe.tasks import Task, task_of
from hf_gpipe.from_recipe.timeline import measure_step
from hf_gpipe.from_recipe.trainer import Prepared, trainer_of
from hf_gpipe.from_recipe.workload import plan_inputs
from hf_gpipe.job.job import Job
from hf_gpipe.job.world import World
from hf_gpipe.pipeline import Pipeline, PipelineRequest
from hf_gpipe.recipe import Recipe, load_saved, may_change
from hf_gpipe.runtime.batches import share
from hf_gpipe.runtime.device_choice import world_for
from hf_gpipe.runtime.mesh import table_of_reader
from hf_gpipe.schedule import Schedule, Timeline, breakdown, draw_png, write_trace
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.optim import step_stage
from hf_gpipe.training.trainer import PipelineTrainer
from hf_gpipe.training.updates import make_update, updates_in_backward

RECIPE_FILE, METRICS_FILE, TIMELINE_FILE, PAGE_FILE = "recipe.yaml", "metrics.json", "timeline.png", "run.html"
#: One JSON object a line: language, source, target and translation of a pair that was evaluated.
TRANSLATIONS_FILE = "translations.jsonl"
TRACE_FILE, BREAKDOWN_FILE = "trace.json", "breakdown.json"
#: The copy of a table that the recipe names, which the recipe beside it names in its place.
TABLE_FILE = "schedule.txt"


def run(recipe: Recipe, job: Job) -> None:
    """Do everything that a recipe asks for. Every process of the job calls it.

    Raises:
        UserError: what the recipe, the data or the checkpoint to resume from get wrong.
    """
    cost_meter = CostMeter()
    task = task_of(recipe)
    world = world_for(recipe.pipeline)
    job.note("checking the recipe")
    world.from_main(lambda: check_recipe(recipe))
    job.note("taking the output directory")
    with owned(Path(recipe.training.output_dir), world):
        _run(recipe, job, world, task, cost_meter)


def _run(recipe: Recipe, job: Job, world: World, task: Task, cost_meter: CostMeter) -> None:
    """Run the job of a recipe whose output directory no other run uses."""
    output_dir = Path(recipe.training.output_dir)
    say: Callable[[str], None] = summary.say if world.is_main else lambda text: None
    checkpoint = _checkpoint_of(recipe, output_dir, world, job)
    first_step = 0 if checkpoint is None else step_of(checkpoint)
    num_processes = recipe.pipeline.division.workers_among(world.num_processes)
    table = table_of_reader(world, lambda: recipe.table(num_processes))
    job.note("preparing the corpus and the tokenizer")
    say("preparing the corpus and the tokenizer")
    config, prepared = _prepared(recipe, task, output_dir, checkpoint, world)
    for path in world.from_main(lambda: writing(output_dir)(_begin)(recipe, output_dir, table)):
        say(f"deleted {path}, because training.resume is never")

    job.note("creating the model")
    pipe = _pipeline(recipe, config, checkpoint, world)
    if not pipe.adapter.labels_rows:
        pipe.adapter.reference.generation_config.max_new_tokens = recipe.evaluation.max_new_tokens
    trainer = trainer_of(recipe, task, pipe, prepared)
    corpus_text = world.from_main(lambda: "" if prepared is None else task.size(recipe.data, prepared.corpus))
    say(summary.start_text(recipe, pipe, corpus_text, checkpoint))
    again = " with training.resume=auto" if recipe.training.resume == "never" else ""
    output = trainer.train_from(checkpoint, resume_hint=f"start again{again}")
    cost_meter.note_memory(pipe)
    if checkpoint is not None and output.global_step == first_step:
        say(f"the training in {output_dir} is finished ({first_step} steps); nothing is left to train")
    if recipe.training.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        best = step_of(Path(trainer.state.best_model_checkpoint))
        say(f"the model is that of step {best}, with the least validation loss of all checkpoints")
    job.note("saving the model")
    trainer.save_model()

    evaluating = f"{task.evaluating} of the {recipe.evaluation.split} split"
    job.note(evaluating)
    say(evaluating)
    tokenizer, corpus = (None, None) if prepared is None else (prepared.tokenizer, prepared.corpus)
    report = task.evaluate(recipe, pipe, tokenizer, corpus)
    job.note("measuring a step")
    batches = trainer.train_batches()
    batch = trainer.prepared(share([batches.whole()] if batches is not None else None, world))
    measured, predicted = _measured(trainer, batch)
    if world.is_main:
        cost = cost_meter.cost(pipe, trainer.state.log_history, measured, batch, first_step)
        metrics = json.dumps(_finite(report.to_dict() | {"cost": cost}), indent=2, ensure_ascii=False)
        with writing(output_dir):
            if report.translations:
                lines = [json.dumps(_finite(asdict(pair)), ensure_ascii=False) for pair in report.translations]
                (output_dir / TRANSLATIONS_FILE).write_text("\n".join([*lines, ""]), encoding="utf-8")
            (output_dir / METRICS_FILE).write_text(f"{metrics}\n")
            _write_timelines(output_dir, measured, predicted)
            page = run_page(output_dir.name, cost, trainer.state.log_history, measured, predicted)
            (output_dir / PAGE_FILE).write_text(page, encoding="utf-8")
    if world.is_main:
        parts, trace = breakdown(measured), output_dir / TRACE_FILE
        where = f"Where one step of {float(parts.total_seconds):.4g} s goes (in detail: {trace}, for ui.perfetto.dev)"
        summary.say(f"\n{where}\n\n{parts.text()}\n\n{report.text(recipe.evaluation.split)}")
        files = {"model and tokenizer": "", "the run as a page": PAGE_FILE, "metrics": METRICS_FILE}
        files["one step's timeline"] = TIMELINE_FILE
        if report.translations:
            files["all translations"] = TRANSLATIONS_FILE
        summary.say("\n".join(f"{word:<19}  {output_dir / name}" for word, name in files.items()))


def _finite(value: Any) -> Any:
    """JSON knows no infinite number and no NaN: they become null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _measured(trainer: PipelineTrainer, batch: Sequence[Batch]) -> tuple[Timeline, Timeline]:
    """The step of `measure_step`, with the trainer's updates at a learning rate of 0.

    They take as long as any, and leave the weights as they are.
    """
    optimizer, pipe = trainer.made_optimizer(), trainer.pipe
    rates = [group["lr"] for group in optimizer.param_groups]

    def update(loss: torch.Tensor, norm: torch.Tensor) -> None:
        pipe.clip_grad_norm_(trainer.args.max_grad_norm, norm)
        make_update(trainer, trainer.state.global_step)

    def update_stage(stage: int, step: int, norm: torch.Tensor) -> None:
        if max_norm := trainer.args.max_grad_norm:
            pipe.clip_stage_grad_norm_(stage, max_norm, norm)
        step_stage(trainer, stage)

    for group in optimizer.param_groups:
        group["lr"] = 0.0
    if updates_in_backward(trainer):
        timelines = measure_step(pipe, batch, update_beside=partial(step_stage, trainer))
    else:
        timelines = measure_step(pipe, batch, update=update_stage if pipe.runs_windows else update)
    pipe.weights.late.make()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return timelines


def _write_timelines(output_dir: Path, measured: Timeline, predicted: Timeline) -> None:
    titles = ("measured", "predicted")
    draw_png(output_dir / TIMELINE_FILE, measured, predicted, titles=titles)
    write_trace(output_dir / TRACE_FILE, measured, predicted, titles=titles)
    (output_dir / BREAKDOWN_FILE).write_text(json.dumps(breakdown(measured).to_dict(), indent=2) + "\n")


def _prepared(
    recipe: Recipe, task: Task, output_dir: Path, checkpoint: Path | None, world: World
) -> tuple[PreTrainedConfig, Prepared | None]:
    """The model's configuration, and in the main process everything that it has prepared."""
    mine: list[Prepared] = []

    def prepare() -> str:
        mine.append(_prepare(recipe, task, output_dir, checkpoint))
        return mine[0].config.to_json_string(use_diff=False)

    values = json.loads(world.from_main(prepare, takes_long=True))
    if mine:
        return mine[0].config, mine[0]
    # Its class is of the recipe, its values are the main process's: they have the tokenizer's ids.
    return type(model_config(recipe, None)).from_dict(values), None


def _prepare(recipe: Recipe, task: Task, output_dir: Path, checkpoint: Path | None) -> Prepared:
    if checkpoint is not None and (output_dir / RECIPE_FILE).exists():
        _check_same_run(recipe, load_saved(output_dir / RECIPE_FILE), checkpoint)
    corpus = task.corpus(recipe)
    tokenizer = task.processor(recipe, corpus, checkpoint)
    # The configuration has the ids of a tokenizer, of which an image processor has none.
    ids = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None
    return Prepared(corpus, tokenizer, model_config(recipe, ids))


def _begin(recipe: Recipe, output_dir: Path, table: Schedule | None) -> list[str]:
    """Make the output directory that of this run, and return the checkpoints of an earlier one that were deleted."""
    deleted = []
    if recipe.training.resume == "never":
        # Left there, a later start would resume from them.
        for path in checkpoints(output_dir):
            remove(path)
            deleted.append(path)
    # Metrics that are there once a run has ended are that run's own, and the recipe beside them is what they are of.
    for name in (METRICS_FILE, TRANSLATIONS_FILE, PAGE_FILE):
        (output_dir / name).unlink(missing_ok=True)
    if table is not None:
        replace_file(output_dir / TABLE_FILE, table.text())
        recipe = recipe.replace(pipeline=recipe.pipeline.replace(schedule=str(output_dir / TABLE_FILE)))
    replace_file(output_dir / RECIPE_FILE, recipe.to_yaml())
    return [str(path) for path in deleted]


def check_recipe(recipe: Recipe) -> None:
    """Raise UserError for files that are not there and a model that cannot be made, before anything takes long."""
    check_files(recipe.data)
    check_model(recipe)


def _checkpoint_of(recipe: Recipe, output_dir: Path, world: World, job: Job) -> Path | None:
    """The checkpoint to resume from, which is whole. Every process calls it."""

    def prepare() -> None:
        make_directory(output_dir)
        # First, for it gives back a checkpoint that was being replaced.
        tidy(output_dir)

    job.note("checking the checkpoint")
    world.from_main(prepare)
    if world.has_several_machines:
        check_shared(output_dir, world)
        _check_same_data(recipe, world)
    if recipe.training.resume == "never":
        return None
    return last_checkpoint(output_dir, world)


def _check_same_data(recipe: Recipe, world: World) -> None:
    """Raise DataError, on every process, where machines have different copies of the data.

    Only the main process reads them, and a machine may be without; but after a restart it may be another's turn.
    """
    is_first = world.neighbours[0] == world.rank
    digests = world.gather_objects(digest_of_files(recipe.data) if is_first else "")
    digest_of = {host: digest for host, digest in zip(world.hosts, digests, strict=True) if digest}
    if len(set(digest_of.values())) > 1:
        copies = ", ".join(f"{digest} on {host}" for host, digest in digest_of.items())
        raise DataError(
            f"data.path {recipe.data.path}: the files differ between the machines (hashes: {copies}); copy them from "
            f"{world.hosts[world.main]}, or put them where all machines see them"
        )


def _check_same_run(recipe: Recipe, earlier: Recipe, checkpoint: Path) -> None:
    """Raise RecipeError where a checkpoint belongs to another training than the recipe's."""
    before, changeable = earlier.values(), may_change()
    for key, value in recipe.values().items():
        if before.get(key) != value and key not in changeable:
            raise RecipeError(
                f"{'.'.join(key)} is {value!r}, and {checkpoint} was trained with {before.get(key)!r}; restore the "
                "value, choose another training.output_dir, or set training.resume=never to train anew and delete the "
                "checkpoints"
            )


def _pipeline(recipe: Recipe, config: PreTrainedConfig, checkpoint: Path | None, world: World) -> Pipeline:
    spec, training, pipeline = spec_of(recipe, config), recipe.training, recipe.pipeline
    inputs = plan_inputs(recipe, workload_of(recipe, config))
    if checkpoint is not None:
        pipeline = pipeline.resumed(read_state(checkpoint).run.num_micro_batches)
    loss, by_length = loss_of(recipe), training.sorts_rows(recipe.data.kind)
    request = PipelineRequest(spec, pipeline, inputs, training.seed, loss, by_length, companion_of(recipe))
    return Pipeline.of(request, world)
