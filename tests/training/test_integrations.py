"""What the trainer shares with other packages: reports, 8-bit optimizers, compiled blocks, iterables that resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_gpipe.errors import UserError
from hf_gpipe.planner import decide
from hf_gpipe.training import arguments as arguments_module
from tests.training.toy import Recorder, Rows, Stream, arguments, trainer, weights


def test_reports_to_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboardX")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer(
        tmp_path,
        report_to="tensorboard",
        eval_strategy="steps",
        eval_steps=3,
        eval_dataset=Rows(4, seed=1),
    ).train()
    (events,) = (tmp_path / "board").rglob("events.out.tfevents.*")
    content = events.read_bytes()
    for name in (b"train/loss", b"train/grad_norm", b"train/learning_rate", b"eval/loss"):
        assert name in content
    for name in (b"train/tokens_per_second", b"train/seconds_left", b"train/peak_memory_bytes_stage_1"):
        assert name in content


def test_eight_bit_optimizers_where_their_package_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(arguments_module, "is_bitsandbytes_available", lambda: False)
        with pytest.raises(UserError, match=r"optim='adamw_bnb_8bit' keeps its state in 8 bits.*not installed"):
            arguments(tmp_path, optim="adamw_bnb_8bit")
    optim = pytest.importorskip("bitsandbytes").optim
    manager = optim.GlobalOptimManager.get_instance()
    before = len(manager.module_weight_config_triple)
    made = trainer(tmp_path, family="llama", optim="adamw_8bit", max_steps=2)
    made.train()
    assert isinstance(made.optimizer, optim.AdamW)
    assert made.optimizer.args.optim_bits == 8
    (overridden,) = manager.module_weight_config_triple[before:]
    assert isinstance(overridden[0], torch.nn.Embedding)
    assert overridden[1:] == ("weight", {"optim_bits": 32}), "as Trainer does"
    said: list[str] = []
    monkeypatch.setattr(decide.logger, "warning", said.append)
    trainer(tmp_path, family="llama", optim="adamw_8bit", num_micro_batches=None, schedule=None)
    assert len(said) == 1, "the planner knows its memory, and says what it has chosen"
    assert said[0].startswith("planner: ")
    assert "adamw_8bit" not in said[0]


def test_blocks_are_compiled_and_checkpointed_where_asked(tmp_path: Path) -> None:
    expected = trainer(tmp_path, family="llama", max_steps=2)
    expected.train()
    compiled = trainer(tmp_path, family="llama", max_steps=2, torch_compile=True, torch_compile_backend="eager")
    compiled.train()
    checkpointed = trainer(tmp_path, family="llama", max_steps=2, gradient_checkpointing=True, recompute="block")
    checkpointed.train()
    for made in (compiled, checkpointed):
        for name, tensor in weights(expected).items():
            torch.testing.assert_close(weights(made)[name], tensor, rtol=0, atol=1e-6)


class _StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == 5


def test_a_stream_is_resumed_where_it_stood(tmp_path: Path) -> None:
    """Within its second pass, whose rows before that place are read and left out."""
    common: dict[str, Any] = {"max_steps": 9, "dropout": 0.1}
    whole, rest = Recorder(), Recorder()
    trainer(tmp_path / "whole", train_dataset=Stream(14), callbacks=[whole], **common).train()
    trainer(tmp_path / "part", train_dataset=Stream(14), callbacks=[_StopAt()], **common).train()
    resumed = trainer(tmp_path / "part", train_dataset=Stream(14), callbacks=[rest], **common)
    resumed.train(resume_from_checkpoint=True)
    assert rest.losses == whole.losses[5:]
