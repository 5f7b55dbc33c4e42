"""transformers' own example scripts run to their end when only two imports are changed, as docs/trainer.md says.

The scripts are not part of this project. They are looked for in a folder beside the checkout, or in the one that
HF_GPIPE_FOREIGN_SCRIPTS names; where there are none, the tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaForCausalLM,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from hf_gpipe.data import train_tokenizer
from tests.oracle import tiny_config
from tests.test_examples import LAUNCHER as ACCELERATE

REPOSITORY = Path(__file__).parents[1]
FOREIGN = Path(os.environ.get("HF_GPIPE_FOREIGN_SCRIPTS", REPOSITORY.parent / "shared/foreign"))
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LAUNCHERS = {
    "alone": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
    "accelerate": ACCELERATE,
}

pytestmark = pytest.mark.skipif(
    not (FOREIGN / "run_translation.py").exists(),
    reason=f"there is no run_translation.py in {FOREIGN}; HF_GPIPE_FOREIGN_SCRIPTS names the folder",
)


def ported(name: str, folder: Path) -> Path:
    """A copy of a script in which the trainer and its arguments are imported from here, under the old names."""
    kind = "" if name == "run_clm.py" else "Seq2Seq"
    old = f"    {kind}Trainer,\n    {kind}TrainingArguments,\n"
    new = (
        f"from hf_gpipe import PipelineTrainer as {kind}Trainer, PipelineTrainingArguments as {kind}TrainingArguments\n"
    )
    text = (FOREIGN / name).read_text(encoding="utf-8")
    assert text.count(old) == 1
    text = text.replace(old, "").replace("\nimport evaluate\n", f"\nimport evaluate\n{new}")
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def run(launcher: str, script: Path, output: Path, *options: str | Path, **variables: str) -> None:
    common = [
        *("--output_dir", output, "--use_cpu", "--max_steps", "3", "--num_stages", "2", "--num_micro_batches", "2"),
        *("--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4", "--report_to", "none"),
    ]
    finished = subprocess.run(
        [*LAUNCHERS[launcher], *map(str, [script, *options, *common])],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests/stand_ins")]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(output.parent / "cache"),
            **variables,
        },
    )
    assert finished.returncode == 0, finished.stderr[-4000:]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with their tokenizer, and the rows of each script."""
    folder = tmp_path_factory.mktemp("foreign")
    train_tokenizer(WORDS * 20, 290, folder / "tokenizer", model="bpe", character_coverage=1.0, target_tags=())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    ids = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    pairs = MarianMTModel(tiny_config("marian", decoder_start_token_id=tokenizer.pad_token_id, **ids))
    causal = tiny_config("llama")
    causal.update(ids)
    for name, model in (("pairs", pairs), ("causal", LlamaForCausalLM(causal))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [" ".join(WORDS[(start + step) % 10] for step in range(4)) for start in range(10)] * 2
    write(folder / "translation.json", [{"translation": {"de": row, "en": row.upper()}} for row in rows])
    write(folder / "summary.json", [{"text": row, "summary": row.split()[0]} for row in rows])
    (folder / "text.txt").write_text("\n".join(rows * 20) + "\n")
    return folder


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as an upload asks for; notes the files of each commit."""

    commits: ClassVar[list[set[str]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        address = f"http://127.0.0.1:{self.server.server_port}/me/mine"  # type: ignore[attr-defined]
        answer: dict[str, object] = {"url": address, "name": "me/mine"}
        if "/preupload/" in self.path:
            kept = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": one["path"], **kept} for one in json.loads(body)["files"]]}
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            self.commits.append({line["value"]["path"] for line in lines if line["key"] == "file"})
            answer = {"commitUrl": f"{address}/commit/1", "commitOid": "1"}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"id": "me/mine", "sha": "1", "siblings": []})

    def _answer(self, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a stand-in for the Hub."""
    Hub.commits.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_translation(work: Path, tmp_path: Path, hub: str) -> None:
    data = work / "translation.json"
    run(
        "torchrun",
        ported("run_translation.py", tmp_path),
        tmp_path / "out",
        *("--model_name_or_path", work / "pairs", "--source_lang", "de", "--target_lang", "en"),
        *("--train_file", data, "--validation_file", data, "--test_file", data),
        *("--max_source_length", "32", "--max_target_length", "16", "--num_beams", "2"),
        *("--do_train", "--do_eval", "--do_predict", "--predict_with_generate"),
        *("--push_to_hub", "--hub_model_id", "me/mine", "--hub_token", "secret"),
        HF_ENDPOINT=hub,
        HF_HUB_OFFLINE="0",
    )
    assert {"config.json", "README.md", "tokenizer.json"} <= Hub.commits[-1]
    results = json.loads((tmp_path / "out/all_results.json").read_text())
    assert {"train_loss", "eval_bleu", "predict_bleu", "eval_gen_len"} <= results.keys()
    assert len((tmp_path / "out/generated_predictions.txt").read_text().splitlines()) == 20
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.language == ["de", "en"]
    assert "generated_from_trainer" in card.data.tags
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")


def test_summarization(work: Path, tmp_path: Path) -> None:
    data = work / "summary.json"
    run(
        "alone",
        ported("run_summarization.py", tmp_path),
        tmp_path / "out",
        *("--model_name_or_path", work / "pairs", "--text_column", "text", "--summary_column", "summary"),
        *("--train_file", data, "--validation_file", data, "--test_file", data),
        *("--max_source_length", "32", "--max_target_length", "16"),
        *("--do_train", "--do_eval", "--do_predict", "--predict_with_generate"),
    )
    results = json.loads((tmp_path / "out/all_results.json").read_text())
    assert {"train_loss", "eval_rouge1", "predict_rouge1"} <= results.keys()
    assert (tmp_path / "out/README.md").exists()
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")


def test_causal_language_modelling_resumed_under_another_launcher(work: Path, tmp_path: Path) -> None:
    options = [
        *("--model_name_or_path", work / "causal", "--block_size", "32", "--save_steps", "2"),
        *("--train_file", work / "text.txt", "--validation_file", work / "text.txt"),
    ]
    script = ported("run_clm.py", tmp_path)
    run("alone", script, tmp_path / "out", *options, "--do_train")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    shutil.rmtree(tmp_path / "out/checkpoint-3")
    resumed = ("--resume_from_checkpoint", tmp_path / "out/checkpoint-2")
    run("accelerate", script, tmp_path / "out", *options, *resumed, "--do_train", "--do_eval")
    resumed_model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    torch.testing.assert_close(resumed_model, whole, rtol=0, atol=1e-6)
    results = json.loads((tmp_path / "out/all_results.json").read_text())
    assert {"train_loss", "eval_accuracy", "perplexity"} <= results.keys()
    assert "generated_from_trainer" in ModelCard.load(tmp_path / "out/README.md").data.tags
