"""The surface of transformers' Trainer: what is here does what Trainer's does, what is not says what to use instead."""

from __future__ import annotations

import ast
import copy
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from transformers import LlamaForCausalLM, Seq2SeqTrainer, Trainer, TrainerCallback, TrainingArguments

from hf_gpipe import PipelineTrainer
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import MissingAttributeError, UserError
from hf_gpipe.training import surface
from scripts.trainer_tables import ATTRIBUTES, FIXED, LACKING, METHODS, READ_ONLY
from tests.gloo import run_gloo
from tests.oracle import plain_model, tiny_config
from tests.training.toy import CausalRows, Rows, arguments, trainer, weights

HERE = METHODS.keys() | FIXED.keys() | ATTRIBUTES.keys() | READ_ONLY.keys()


def library_names() -> set[str]:
    """The public methods of the installed trainers, and the attributes that they set."""
    names = {name for cls in (Trainer, Seq2SeqTrainer) for name in vars(cls)}
    for cls in (Trainer, Seq2SeqTrainer):
        for node in ast.walk(ast.parse(inspect.getsource(cls))):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
    return {name for name in names if not name.startswith("_")}


def made(folder: Path, cls: type[PipelineTrainer] = PipelineTrainer, **values: Any) -> PipelineTrainer:
    own = {name: values.pop(name) for name in ("callbacks", "eval_dataset") if name in values}
    config, collate = tiny_config("marian", dropout=0.1), PairCollator(pad_token_id=0)
    return cls(config, arguments(folder, **values), collate, train_dataset=Rows(), **own)


def test_every_public_name_is_in_one_table() -> None:
    tables = [*METHODS, *FIXED, *ATTRIBUTES, *READ_ONLY, *LACKING]
    assert len(tables) == len(set(tables)), "a name is in two tables"
    missing = library_names() - set(tables)
    assert not missing, f"transformers' Trainer has names that nobody has decided about: {sorted(missing)}"
    assert (set(surface.FIXED), set(surface.READ_ONLY)) == (set(FIXED), set(READ_ONLY))
    assert set(surface.LACKING) <= set(LACKING)


def test_what_the_tables_promise_is_here_and_nothing_else(tmp_path: Path) -> None:
    one = made(tmp_path)
    assert [name for name in sorted(HERE) if not hasattr(one, name)] == []
    own = set(vars(PipelineTrainer)) | {name for cls in PipelineTrainer.__mro__ for name in vars(cls)}
    assert [name for name in sorted(LACKING) if name not in own and hasattr(one, name)] == []
    assert getattr(one, "label_smoother", None) is None
    with pytest.raises(AttributeError, match=r"has no label_smoother; docs/reference/trainer\.md says") as caught:
        one.label_smoother  # noqa: B018
    assert isinstance(caught.value, MissingAttributeError)
    assert isinstance(caught.value, UserError)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        one.trian  # noqa: B018


@pytest.mark.parametrize("name", sorted((METHODS.keys() | FIXED.keys()) & set(dir(Trainer))))
def test_methods_take_what_the_library_s_take(name: str) -> None:
    ours = inspect.signature(getattr(PipelineTrainer, name)).parameters
    theirs = inspect.signature(getattr(Trainer, name)).parameters
    takes_any = any(one.kind == inspect.Parameter.VAR_KEYWORD for one in ours.values())
    assert takes_any or [one for one in theirs if one not in ours] == []


@pytest.mark.parametrize("name", sorted(n for n in dir(Seq2SeqTrainer) if not n.startswith("__") and n not in METHODS))
def test_an_override_that_would_not_be_called_is_refused(name: str) -> None:
    """The training went on with Trainer's loss, sampler, or whatever the subclass had replaced, and said nothing."""
    cls = type("Mine", (PipelineTrainer,), {name: lambda *args, **kwargs: None})
    with pytest.raises(UserError, match=rf"^Mine overrides {name}, which PipelineTrainer does not call; docs/ref"):
        cls()


def test_overrides_are_found_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mixin:
        def compute_loss(self, model: Any, inputs: Any) -> None: ...

    class Several(PipelineTrainer):
        def training_step(self, model: Any, inputs: Any) -> None: ...
        def prediction_step(self, model: Any, inputs: Any) -> None: ...

    with pytest.raises(UserError, match="overrides prediction_step and training_step"):
        Several()

    class WithoutInternalCall(PipelineTrainer):
        def save_model(self, output_dir: Any = None) -> None: ...  # type: ignore[override]  # what it is about

    with pytest.raises(UserError, match="save_model of WithoutInternalCall has no parameter _internal_call"):
        WithoutInternalCall()
    for bases in ((Mixin, PipelineTrainer), (PipelineTrainer, Mixin)):
        with pytest.raises(UserError, match="overrides compute_loss"):
            type("Mixed", bases, {})()
    with pytest.raises(UserError, match="derives from transformers' Trainer as well"):
        type("Both", (PipelineTrainer, Trainer), {})()
    one = made(tmp_path, eval_dataset=Rows(4))
    with pytest.raises(UserError, match=r"PipelineTrainer\.training_step cannot be set"):
        one.training_step = lambda model, inputs: None
    with pytest.raises(UserError, match=r"PipelineTrainer\.label_smoother cannot be set"):
        one.label_smoother = None
    monkeypatch.setattr(PipelineTrainer, "compute_loss", lambda *args: None, raising=False)
    for act in (one.train, one.evaluate, lambda: one.predict(Rows(4))):
        with pytest.raises(UserError, match="overrides compute_loss"):
            act()
    monkeypatch.undo()
    monkeypatch.setattr(PipelineTrainer, "_save_checkpoint", lambda *args: None, raising=False)
    with pytest.raises(UserError, match="overrides _save_checkpoint"):
        one.train()


class Overridden(PipelineTrainer):
    """Overrides what may be overridden, and notes that it was called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[str] = []
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.calls.append("create_optimizer")
        decayed = self.get_decay_parameter_names(self.model)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if name in decayed], "weight_decay": 0.5},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.calls.append(f"create_scheduler {num_training_steps}")
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer or self.optimizer, 0.5, 2)
        return self.lr_scheduler

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        super().log({**logs, "mine": 1.0}, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.calls.append("evaluate")
        return super().evaluate(*args, **kwargs)

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        self.calls.append("save_model")
        if self.is_world_process_zero():
            (Path(output_dir) / "mine.txt").write_text("mine")


def _train_overridden(folder: str) -> tuple[list[str], dict[str, torch.Tensor], list[dict[str, Any]]]:
    one = made(
        Path(folder), Overridden, eval_dataset=Rows(4), eval_strategy="steps", eval_steps=3, save_strategy="steps"
    )
    one.args.save_steps = 3
    one.train()
    logs = [{k: v for k, v in log.items() if "runtime" not in k and "second" not in k} for log in one.state.log_history]
    return one.calls, weights(one), logs


def test_overrides_are_called_on_one_process_and_on_two(tmp_path: Path) -> None:
    calls, alone, logs = _train_overridden(str(tmp_path / "alone"))
    assert calls == ["create_optimizer", "create_scheduler 6", *["evaluate", "save_model"] * 2]
    assert (tmp_path / "alone/checkpoint-3/mine.txt").exists()
    assert all(log["mine"] == 1.0 for log in logs)
    assert [log["learning_rate"] for log in logs if "learning_rate" in log][:3] == [0.005, 0.005, 0.01]
    for other_calls, together, _ in run_gloo(_train_overridden, 2, str(tmp_path / "together")):
        assert other_calls == calls
        assert together.keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(together[name], expected, rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    class Nothing(PipelineTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

    class Half(PipelineTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(list(self.model.parameters())[:3], lr=0.1)
            return self.optimizer

    with pytest.raises(UserError, match="there is no optimizer yet"):
        made(tmp_path, Nothing).train()
    with pytest.raises(UserError, match=r"holds 2 of the \d+ trainable"):
        made(tmp_path, Half).train()


def test_an_override_says_which_weights_decay_and_which_optimizer(tmp_path: Path) -> None:
    class Mine(PipelineTrainer):
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return [name for name in super().get_decay_parameter_names(model) if "fc1" not in name]

        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
            return torch.optim.RMSprop, {"lr": args.learning_rate}

    one = made(tmp_path, Mine)
    one.train()
    assert isinstance(one.optimizer, torch.optim.RMSprop)
    names = {parameter: name for name, parameter in one.model.named_parameters()}
    decayed = {names[p] for p in one.optimizer.param_groups[0]["params"]}
    assert any("fc2.weight" in name for name in decayed)
    assert not any("fc1" in name for name in decayed)


def test_callbacks_are_given_the_trained_model(tmp_path: Path) -> None:
    """They were given a model on the meta device, of whose weights nothing could be read."""
    seen: list[Any] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((kwargs["model"], kwargs["model"].model.shared.weight.detach().clone(), one.is_in_train))

    one = made(tmp_path, callbacks=[Watch()], max_steps=2)
    one.train()
    assert all(model is one.model is one.model_wrapped for model, _, _ in seen)
    assert not torch.equal(seen[0][1], seen[1][1])
    assert [flag for *_, flag in seen] == [True, True]
    assert not one.is_in_train
    with pytest.raises(UserError, match="model cannot be set"):
        one.model = None
    one.model.lm_head.weight = torch.nn.Parameter(one.model.lm_head.weight.detach().clone())
    for act in (one.train, lambda: one.predict(Rows(4)), one.save_model):
        with pytest.raises(UserError, match="was replaced and would not be trained"):
            act()


def test_loaders_have_the_mini_batches_of_the_training(tmp_path: Path) -> None:
    one = made(tmp_path, eval_dataset={"a": Rows(5)}, per_device_eval_batch_size=2, gradient_accumulation_steps=2)
    loader = one.get_train_dataloader()
    assert len(loader) == len(list(loader)) == 6
    assert one.num_examples(loader) == 24
    assert one.get_total_train_batch_size(one.args) == 8
    assert [
        torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(loader, one.train_batches().epoch(0), strict=True)
    ] == [True] * 6
    assert len(one.get_eval_dataloader("a")) == 3
    assert sum(len(batch["labels"]) for batch in one.get_test_dataloader(Rows(7))) == 7
    with pytest.raises(UserError, match="requires an eval_dataset"):
        made(tmp_path).get_eval_dataloader()
    with pytest.raises(UserError, match="eval_strategy='steps' requires an eval_dataset; give one"):
        made(tmp_path, eval_strategy="steps", eval_steps=5).train()  # before its first step


def test_numbers_that_scripts_ask_for(tmp_path: Path) -> None:
    one = made(tmp_path, include_num_input_tokens_seen=True)
    assert one.is_local_process_zero()
    with pytest.raises(UserError, match="no optimizer yet"):
        one.get_learning_rates()
    one.create_optimizer_and_scheduler(10)
    assert one.get_learning_rates() == [0.01, 0.01]
    parameter = next(iter(one.model.parameters()))
    assert any(parameter is other for other in one.get_optimizer_group(parameter)["params"])
    trainable = sum(p.numel() for p in one.pipe.parameters() if p.requires_grad)
    assert one.get_num_trainable_parameters() == trainable
    one.log({"loss": 1.0}, start_time=0.0)
    assert "train_tokens_per_second" in one.state.log_history[-1]
    with pytest.raises(UserError, match="trial"):
        one.train(trial=object())


def test_padding_is_not_counted_where_a_mask_or_the_tokenizer_tells_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an attention_mask all tokens were counted, in silence."""

    def unmasked(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = PairCollator(pad_token_id=0)(rows)
        return {name: batch[name] for name in ("input_ids", "labels")}

    counts, warning = [], "counts all tokens, since the mini-batches have no attention_mask"
    for collate, pad in ((PairCollator(pad_token_id=0), None), (unmasked, 0), (unmasked, None)):
        one = made(tmp_path, include_num_input_tokens_seen="non_padding", max_steps=6)
        one.data_collator, one.processing_class = collate, SimpleNamespace(pad_token_id=pad, save_pretrained=str)
        assert warning not in caplog.text
        one.train()
        counts.append(one.state.num_input_tokens_seen)
    assert counts[0] == counts[1] == sum(map(len, Rows().rows)) < counts[2]
    assert warning in caplog.text


def test_a_model_card_is_drafted(tmp_path: Path) -> None:
    one = made(tmp_path, gradient_accumulation_steps=2)
    one.create_model_card(language="de", tags="mine", finetuned_from="base/model", tasks="translation", dataset="Some")
    first = (tmp_path / "README.md").read_text()
    for text in ("- de", "- mine", "base_model: base/model", "generated_from_trainer", "total_train_batch_size: 8"):
        assert text in first
    assert "num_stages: 2" in first
    one.create_model_card(tags=["other"])
    assert "- mine" in (tmp_path / "README.md").read_text()


def test_the_tags_of_a_model_are_on_its_card(tmp_path: Path) -> None:
    """TRL and scripts tag the model, and its card had no such tag."""
    model = LlamaForCausalLM(tiny_config("llama"))
    model.add_model_tags("given")
    one = PipelineTrainer(model, arguments(tmp_path), train_dataset=CausalRows(4))
    one.model.add_model_tags(["added", "given"])
    assert one.model.model_tags == copy.deepcopy(one.model).model_tags == ["given", "added"]
    one.create_model_card(tags="mine")
    assert ModelCard.load(tmp_path / "README.md").data.tags == ["mine", "given", "added", "generated_from_trainer"]
    one.save_model(str(tmp_path / "model"))
    assert ModelCard.load(tmp_path / "model/README.md").data.tags == ["given", "added", "generated_from_trainer"]


def test_the_size_of_a_training_is_logged_as_trainer_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With log_level="info" nothing was said of the training."""
    one = made(tmp_path, log_level="info")
    try:
        one.train()
    finally:
        transformers.logging.set_verbosity_warning()
    for words in ("Running training", "Total optimization steps = 6", "Rows of a step = 4"):
        assert words in caplog.text


def test_a_saved_model_has_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """save_model wrote no card and said nothing; adapters had no base model in their card, which peft writes."""
    peft = pytest.importorskip("peft")
    plain_model(tiny_config("llama"), dtype=torch.float32).save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    peft.get_peft_model(base, lora).save_pretrained(tmp_path / "plain")
    expected = ModelCard.load(tmp_path / "plain/README.md").data
    args = arguments(tmp_path / "out", max_steps=1)
    one = PipelineTrainer(str(tmp_path / "base"), args, PairCollator(0), train_dataset=CausalRows(4), peft_config=lora)
    one.train()
    one.save_model(str(tmp_path / "adapters"))
    card = ModelCard.load(tmp_path / "adapters/README.md")
    assert (card.data.base_model, card.data.library_name) == (expected.base_model, expected.library_name)
    assert f"the model is saved in {tmp_path / 'adapters'}" in capsys.readouterr().err
    # The card of a user stays as it is, and it may be changed without harm to the model.
    (tmp_path / "adapters/README.md").write_text("mine")
    one.save_model(str(tmp_path / "adapters"))
    assert (tmp_path / "adapters/README.md").read_text() == "mine"
    PipelineTrainer(str(tmp_path / "adapters"), args, PairCollator(0), train_dataset=CausalRows(4))
    whole = made(tmp_path / "whole")
    whole.train_dataset = object()  # nothing of a card may cost a model
    whole.save_model()
    assert "generated_from_trainer" in (tmp_path / "whole/README.md").read_text()


def test_model_init_may_take_a_trial(tmp_path: Path) -> None:
    from transformers import MarianMTModel

    for init in (lambda: MarianMTModel(tiny_config("marian")), lambda trial: MarianMTModel(tiny_config("marian"))):
        one = PipelineTrainer(args=arguments(tmp_path), model_init=init, train_dataset=Rows())
        assert one.model_init is init


def test_each_training_calls_model_init_anew(tmp_path: Path) -> None:
    """A second training went on with the trained weights and the old optimizer; Trainer begins anew."""
    common: dict[str, Any] = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
    }
    numbers = iter(range(9))

    def init() -> Any:
        model = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
        # Trainer's first training calls it a second time, here it takes the model of the constructor.
        torch.nn.init.normal_(model.lm_head.weight, std=0.01 * (1 + next(numbers)))
        return model

    plain = Trainer(
        None,
        TrainingArguments(output_dir=str(tmp_path / "plain"), use_cpu=True, disable_tqdm=True, **common),
        data_collator=PairCollator(pad_token_id=0),
        train_dataset=CausalRows(8),
        model_init=init,
    )
    plain.train()
    expected = plain.train()
    numbers = iter(range(1, 9))
    made = trainer(tmp_path, family="llama", model=None, model_init=init, train_dataset=CausalRows(8), **common)
    made.train()
    found = made.train()
    assert found.training_loss == pytest.approx(expected.training_loss, abs=1e-5)
    for name, parameter in made.pipe.named_parameters():
        torch.testing.assert_close(parameter, plain.model.get_parameter(name), rtol=0, atol=2e-5, msg=name)
    assert next(numbers) == 3
    assert made.callback_handler.model is made.model


def test_the_trainer_of_the_tests_is_the_one_here(tmp_path: Path) -> None:
    assert trainer(tmp_path).label_names == ["labels"]
