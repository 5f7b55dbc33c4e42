"""Runs transformers' own example scripts with two class names replaced, in every mode, beside plain transformers.

    python scripts/foreign_scripts.py FOLDER [--steps 30] [--launchers alone torchrun] [--names clm]

FOLDER has run_translation.py, run_summarization.py and run_clm.py of transformers. Each runs alone, under torchrun and
under accelerate launch, in two stages: it trains, evaluates, predicts with generation and pushes to a stand-in of the
Hub; then it resumes from the checkpoint in the middle. The table has each mode's exit code and its largest differences
from the unchanged script: of training losses, of metrics and of weights, and whether all texts generated are the same.
The exit code is 1 where a mode fails or differs by more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaForCausalLM,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from hf_gpipe.data import train_tokenizer
from tests.oracle import tiny_config
from tests.stand_ins.hub import Hub, stand_in_hub

REPOSITORY = Path(__file__).parents[1]
STAND_INS = REPOSITORY / "tests/stand_ins"
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NAMES = ("translation", "summarization", "clm")
LAUNCHERS = {
    "alone": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
    "accelerate": [
        *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ],
}
PIPELINE = ["--num_stages", "2", "--num_micro_batches", "2"]
PUSH = ["--push_to_hub", "--hub_model_id", "me/mine", "--hub_token", "secret"]
TOLERANCE = 1e-4


def ported(script: Path, folder: Path) -> Path:
    """A copy of a script in which the trainer and its arguments are imported from here, under the old names."""
    kind = "" if script.name == "run_clm.py" else "Seq2Seq"
    old = f"    {kind}Trainer,\n    {kind}TrainingArguments,\n"
    names = f"PipelineTrainer as {kind}Trainer, PipelineTrainingArguments as {kind}TrainingArguments"
    new = f"from hf_gpipe import {names}\n"
    text = script.read_text(encoding="utf-8")
    assert text.count(old) == 1
    text = text.replace(old, "").replace("\nimport evaluate\n", f"\nimport evaluate\n{new}")
    path = folder / script.name
    path.write_text(text, encoding="utf-8")
    return path


def prepare(folder: Path) -> None:
    """Two models with their tokenizer, and the rows of each script."""
    train_tokenizer(WORDS * 20, 290, folder / "tokenizer", model="bpe", character_coverage=1.0, target_tags=())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")} | {"vocab_size": len(tokenizer)}
    # AdamW makes much of rounding where a gradient is next to nothing, which other weights may have.
    torch.manual_seed(0)
    pairs = MarianMTModel(tiny_config("marian", decoder_start_token_id=tokenizer.pad_token_id, **ids))
    causal = tiny_config("llama")
    causal.update(ids)
    for name, model in (("pairs", pairs), ("causal", LlamaForCausalLM(causal))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [" ".join(WORDS[(start + step) % 10] for step in range(4)) for start in range(10)] * 2
    _write(folder / "translation.json", [{"translation": {"de": row, "en": row.upper()}} for row in rows])
    _write(folder / "summarization.json", [{"text": row, "summary": row.split()[0]} for row in rows])
    (folder / "text.txt").write_text("\n".join(rows * 20) + "\n")


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def words_of(name: str, work: Path, output: Path, steps: int) -> list[str]:
    """A script's options for training, evaluation and, if it can, prediction, with what `prepare` wrote."""
    data = work / f"{name}.json"
    of_script: list[str | Path] = ["--model_name_or_path", work / "causal", "--block_size", "32", "--train_file"]
    if name == "clm":
        of_script += [work / "text.txt", "--validation_file", work / "text.txt"]
    else:
        of_script = ["--model_name_or_path", work / "pairs", "--do_predict", "--predict_with_generate"]
        of_script += ["--train_file", data, "--validation_file", data, "--test_file", data]
        of_script += ["--max_source_length", "32", "--max_target_length", "8", "--num_beams", "2"]
        of_script += ["--max_predict_samples", "8"]
    if name == "translation":
        of_script += ["--source_lang", "de", "--target_lang", "en"]
    if name == "summarization":
        of_script += ["--text_column", "text", "--summary_column", "summary"]
    return [
        *map(str, of_script),
        *("--output_dir", str(output), "--do_train", "--do_eval", "--use_cpu", "--report_to", "none"),
        *("--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4", "--learning_rate", "1e-2"),
        *("--max_eval_samples", "8"),
        *("--max_steps", str(steps), "--save_steps", str(steps // 2), "--logging_steps", "1"),
        # Trainer shuffles in an order of its own.
        *("--train_sampling_strategy", "sequential"),
    ]


def run(launcher: str, words: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script with a launcher: one thread a process, no network, caches in `folder`."""
    path = os.pathsep.join([str(REPOSITORY), str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    command, given = [*LAUNCHERS[launcher], *words], {**os.environ, **own, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=given)


def resumable(output: Path, steps: int, into: Path) -> Path:
    """Copy the checkpoint in the middle of a run's output to another output directory."""
    name = f"checkpoint-{steps // 2}"
    shutil.copytree(output / name, into / name)
    return into / name


class Differences(NamedTuple):
    """The largest differences of a run from another.

    Attributes:
        losses: of the training losses of the steps that both have logged.
        metrics: of evaluation and prediction, but for speeds; of a value above 1, such as a perplexity, relative.
        weights: of the weights that transformers saves.
        same_texts: whether all generated texts are the same.
    """

    losses: float
    metrics: float
    weights: float
    same_texts: bool

    @property
    def are_small(self) -> bool:
        """Whether the runs agree."""
        return max(self.losses, self.metrics, self.weights) <= TOLERANCE and self.same_texts


def differences(output: Path, expected: Path) -> Differences:
    """Compare the outputs of two runs."""
    losses, other_losses = _losses(output), _losses(expected)
    metrics, other_metrics = _metrics(output), _metrics(expected)
    assert losses, f"{output} has no losses"
    assert metrics.keys() == other_metrics.keys()
    weights, other_weights = _weights(output), _weights(expected)
    texts = [path / "generated_predictions.txt" for path in (output, expected)]
    return Differences(
        max(abs(loss - other_losses[step]) for step, loss in losses.items()),
        max(abs(value - other_metrics[name]) / max(1.0, abs(other_metrics[name])) for name, value in metrics.items()),
        max(float((tensor - other_weights[name]).abs().max()) for name, tensor in weights.items()),
        len({path.read_text() if path.exists() else None for path in texts}) == 1,
    )


def _weights(output: Path) -> dict[str, torch.Tensor]:
    is_encoder_decoder = json.loads((output / "config.json").read_text()).get("is_encoder_decoder")
    auto_class = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
    model = auto_class.from_pretrained(output)
    # transformers 5.24 trains Marian's tables of positions, and loses them when it saves; hf_gpipe saves them.
    unsaved = set(model._keys_to_ignore_on_save or ())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in unsaved}


def _losses(output: Path) -> dict[int, float]:
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in log if "loss" in entry}


def _metrics(output: Path) -> dict[str, float]:
    results = json.loads((output / "all_results.json").read_text()).items()
    kinds, speeds = ("eval_", "predict_", "perplexity"), ("_runtime", "_per_second", "_time")
    return {name: value for name, value in results if name.startswith(kinds) and not name.endswith(speeds)}


def main() -> int:
    """Run the modes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the directory with transformers' scripts")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES)
    given = parser.parse_args()
    failed = False
    print("| script | launcher | mode | exit code | losses | metrics | weights | texts |")
    print("|---|---|---|--:|--:|--:|--:|---|")
    with tempfile.TemporaryDirectory() as name, stand_in_hub() as hub:
        work = Path(name)
        prepare(work)
        for script in given.names:
            failed |= not _runs_as_plain(given.folder, script, given.launchers, given.steps, work, hub)
    return int(failed)


def _runs_as_plain(folder: Path, name: str, launchers: Sequence[str], steps: int, work: Path, hub: str) -> bool:
    """Run a script in all modes and print their rows; whether all of them do what the unchanged script does."""
    unchanged = folder / f"run_{name}.py"
    plain = work / name / "plain"
    finished = run("alone", [str(unchanged), *words_of(name, work, plain, steps)], work)
    assert finished.returncode == 0, finished.stderr[-4000:]
    script, all_good = str(ported(unchanged, work)), True
    for launcher in launchers:
        whole, resumed = (work / name / launcher / mode for mode in ("whole", "resumed"))
        modes = {"train, eval, predict, push": (whole, PUSH), "resumed": (resumed, [])}
        for mode, (output, options) in modes.items():
            if output is resumed:
                options = ["--resume_from_checkpoint", str(resumable(whole, steps, resumed))]
            words = [script, *words_of(name, work, output, steps), *PIPELINE, *options]
            pushes = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"} if options is PUSH else {}
            Hub.commits.clear()
            finished = run(launcher, words, work, **pushes)
            row = f"| {name} | {launcher} | {mode} | {finished.returncode} |"
            if finished.returncode:
                print(row, flush=True)
                print(finished.stderr[-4000:], file=sys.stderr)
                return False
            difference = differences(output, plain)
            is_pushed = not pushes or {"config.json", "README.md", "tokenizer.json"} <= set().union(*Hub.commits)
            all_good &= difference.are_small and is_pushed
            print(
                f"{row} {difference.losses:.1e} | {difference.metrics:.1e} | {difference.weights:.1e} | "
                f"{'same' if difference.same_texts else 'differ'}{'' if is_pushed else '; not pushed'} |",
                flush=True,
            )
    return all_good


if __name__ == "__main__":
    sys.exit(main())
