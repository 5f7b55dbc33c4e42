"""A trainer may leave M, schedule, recomputation and partition to the planner, which looks at the rows' lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_gpipe import Pipeline, PipelineTrainer
from hf_gpipe.checkpoint.state import read_state
from hf_gpipe.errors import UserError
from hf_gpipe.from_recipe import job
from hf_gpipe.job.job import Job
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import parse_recipe
from hf_gpipe.recipe.batch_size import BatchSize
from hf_gpipe.settings.pipeline import PLANNED
from hf_gpipe.training import checkpoints
from hf_gpipe.training.longest import longest_mini_batch
from tests.oracle import tiny_config
from tests.training.toy import Rows, Stream, arguments, trainer

RECIPE = """
model:
  config: {{model_type: marian, d_model: 8, encoder_layers: 1, decoder_layers: 1, encoder_attention_heads: 1,
    decoder_attention_heads: 1, encoder_ffn_dim: 8, decoder_ffn_dim: 8, max_position_embeddings: 64, dropout: 0.1}}
data: {{kind: cldr, languages: [de], templates: [weekday], examples_per_language: 100, test_fraction: 0.1}}
tokenizer: {{vocab_size: 290}}
pipeline: {{num_stages: 2, device: cpu}}
training: {{output_dir: {folder}/out, max_steps: 2, batch_size: 4, save_steps: 2}}
evaluation: {{max_examples: 1, max_new_tokens: 2, samples: 0}}
"""


def test_the_longest_rows_are_planned_for() -> None:
    rows = Rows(50)
    longest = max(len(row) for row in rows.rows)
    assert longest_mini_batch(rows, BatchSize(8)) == Workload(8, longest, longest + 1)
    assert longest_mini_batch([{"input_ids": [1, 2, 3]}], BatchSize(4)) == Workload(4, 3, 3)
    sorted_rows = longest_mini_batch(rows, BatchSize(8, 100), by_length=True)
    assert sorted_rows == Workload(-(-100 // (longest + 1)), longest, longest + 1)
    mean = sum(len(row["labels"]) for row in rows) // len(rows)
    assert mean < longest
    assert longest_mini_batch(rows, BatchSize(8, 100)) == Workload(-(-100 // mean), longest, longest + 1)
    packed = longest_mini_batch(rows, BatchSize(8), packing=True)
    assert packed is not None
    assert packed.is_packed
    assert mean <= packed.source_tokens <= packed.longest_source == longest
    assert mean <= packed.target_tokens <= packed.longest_target == longest + 1
    masked = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}]
    assert longest_mini_batch(masked, BatchSize(4, 9)) == Workload(5, 4, 4)
    stream = Stream()
    stream.longest = (30, 40)  # type: ignore[attr-defined]  # as StreamedExamples has it
    assert longest_mini_batch(stream, BatchSize(8)) == Workload(8, 30, 40)
    assert longest_mini_batch(stream, BatchSize(8, 100)) == Workload(3, 30, 40)
    assert longest_mini_batch(stream, BatchSize(8), packing=True) == Workload.packed(8, (30, 30), (40, 40))
    for unknown in (Stream(), [], ["text"], None):
        assert longest_mini_batch(unknown, BatchSize(8)) is None


def test_what_is_auto_is_settled(tmp_path: Path) -> None:
    chosen = {"num_micro_batches": "auto", "schedule": "auto", "recompute": "auto", "partition": "auto"}
    args = arguments(tmp_path, num_stages=2, memory="1GiB", max_steps=1, **chosen)
    trainer = PipelineTrainer(tiny_config("marian"), args, train_dataset=Rows())
    assert isinstance(trainer.pipe.num_micro_batches, int)
    assert trainer.pipe.recompute == "none", "1 GiB is more than enough"
    with pytest.raises(UserError, match=r"give values .* example="):
        PipelineTrainer(tiny_config("marian"), args, train_dataset=Stream())


def test_what_is_not_given_is_planned_where_the_rows_have_lengths(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1, **dict.fromkeys(PLANNED))
    planned = PipelineTrainer(tiny_config("marian"), args, train_dataset=Rows()).pipe
    assert planned.planned is not None
    assert planned.recompute == "none"
    unknown = PipelineTrainer(tiny_config("marian"), args, train_dataset=Stream()).pipe
    assert unknown.planned is None
    assert (unknown.num_micro_batches, unknown.schedule_name, unknown.recompute) == (1, "gpipe", "stage")
    asynchronous = arguments(
        tmp_path, max_steps=1, **dict.fromkeys(PLANNED) | {"schedule": "pipedream", "num_stages": 1}
    )
    given = PipelineTrainer(tiny_config("marian"), asynchronous, train_dataset=Rows()).pipe
    assert given.planned is None, "the planner chooses among synchronous schedules"


@pytest.mark.usefixtures("no_prediction")
def test_what_was_chosen_for_micro_batches_stays_on_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout depends on the micro-batch, and the planner's choice on the machine and on its version."""
    # As a run had it that was started when these were defaults.
    before = ["pipeline.num_micro_batches=4", "pipeline.schedule=gpipe", "training.on_nonfinite_loss=stop"]
    job.run(parse_recipe(RECIPE.format(folder=tmp_path), before), Job.current())
    seen: list[Pipeline] = []
    made_of = Pipeline.of
    monkeypatch.setattr(Pipeline, "of", lambda *args: seen.append(made_of(*args)) or seen[-1])
    for key, steps in (("auto", 3), ("null", 4)):
        again = [f"pipeline.num_micro_batches={key}", f"training.max_steps={steps}"]
        job.run(parse_recipe(RECIPE.format(folder=tmp_path), again), Job.current())
    assert [pipe.num_micro_batches for pipe in seen] == [4, 4]
    assert read_state(tmp_path / "out/checkpoint-4").run.num_micro_batches == 4
    made = trainer(tmp_path, num_micro_batches="auto", max_steps=2, save_strategy="steps", save_steps=2)
    made.train()
    again = trainer(tmp_path, num_micro_batches=None, max_steps=2)
    assert again.pipe.num_micro_batches == made.pipe.num_micro_batches
    made.pipe.num_micro_batches = 1 if made.pipe.num_micro_batches > 1 else 2
    warned: list[str] = []
    monkeypatch.setattr(checkpoints.logger, "warning", warned.append)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "dropout will be another" in warned[0]
