"""Uploads to the Hub, with a stand-in for it: what is uploaded, when, and what happens where it refuses."""

from __future__ import annotations

from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForSeq2SeqLM

from hf_gpipe.errors import RecipeError, UserError
from hf_gpipe.from_recipe.trainer import arguments_of
from hf_gpipe.recipe import parse_recipe
from hf_gpipe.training import hub
from tests.training.toy import Recorder, trainer


class StandIn:
    """Notes what it is asked; a commit is the list of files that would be uploaded."""

    calls: list[dict[str, Any]]
    created: list[dict[str, Any]]

    def create_repo(self, name: str, **options: Any) -> Any:
        if name == "someone/else":
            raise PermissionError("403")
        self.created.append({"name": name, **options})
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, **options: Any) -> Any:
        folder = Path(options["folder_path"])
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        ignored = options.get("ignore_patterns", ())
        options["files"] = {f for f in files if not any(fnmatch(f, pattern) for pattern in ignored)}
        self.calls.append(options)
        if not options["run_as_future"]:
            return "commit"
        future: Future[str] = Future()
        if options.get("path_in_repo") == "last-checkpoint":
            future.set_exception(OSError("the network"))
        else:
            future.set_result("commit")
        return future


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    StandIn.calls, StandIn.created = [], []
    monkeypatch.setattr(hub, "HfApi", StandIn)
    return StandIn


def test_checkpoints_and_the_model_are_uploaded(stand_in: type[StandIn], tmp_path: Path) -> None:
    recorder = Recorder()
    made = trainer(
        tmp_path / "mine",
        callbacks=[recorder],
        push_to_hub=True,
        hub_strategy="all_checkpoints",
        hub_token="secret",
        hub_private_repo=True,
        hub_revision="branch",
        save_strategy="steps",
        save_steps=3,
        save_total_limit=1,
    )
    assert stand_in.created == [{"name": "mine", "token": "secret", "private": True, "exist_ok": True}]
    made.train()
    assert [call.get("path_in_repo") for call in stand_in.calls] == [None, "checkpoint-3", None, "checkpoint-6"]
    assert {call["repo_id"] for call in stand_in.calls} == {"me/mine"}
    assert {call["revision"] for call in stand_in.calls} == {"branch"}
    model, whole = stand_in.calls[:2]
    assert "model.safetensors.index.json" in model["files"]
    assert not any("training_state" in file for file in model["files"])
    assert any("training_state" in file for file in whole["files"])
    assert model["commit_message"] == "Training in progress, step 3"
    assert made.push_to_hub("Done") == "commit"
    last = stand_in.calls[-1]
    assert (last["commit_message"], last["folder_path"]) == ("Done", str(tmp_path / "mine"))
    assert not any("checkpoint-" in file for file in last["files"])
    assert recorder.events.count("on_push_begin") == 3
    made.save_model()
    assert stand_in.calls[-1]["commit_message"] == "Model save"
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "mine")


def test_an_upload_that_fails_does_not_end_the_training(
    stand_in: type[StandIn], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(
        tmp_path, push_to_hub=True, hub_strategy="checkpoint", save_strategy="steps", save_steps=6, hub_model_id="m"
    )
    assert made.train().global_step == 6
    assert made.uploads._pending == []


def test_only_at_the_end_or_only_when_asked(stand_in: type[StandIn], tmp_path: Path) -> None:
    trainer(tmp_path, push_to_hub=True, hub_strategy="end", save_strategy="steps", save_steps=3).train()
    assert stand_in.calls == []
    quiet = trainer(tmp_path / "quiet", save_strategy="steps", save_steps=3)
    quiet.train()
    assert stand_in.calls == []
    quiet.push_to_hub(private=True, token="other", revision="side", finetuned_from="base/model", language="de")
    card = (tmp_path / "quiet/README.md").read_text()
    assert "base_model: base/model" in card
    assert "- de" in card
    assert "README.md" in stand_in.calls[-1]["files"]
    assert quiet.hub_model_id == "me/quiet"
    assert stand_in.created[-1] == {"name": "quiet", "token": "other", "private": True, "exist_ok": True}
    assert (stand_in.calls[-1]["token"], stand_in.calls[-1]["revision"]) == ("other", "side")


def test_what_the_hub_refuses_is_one_message(stand_in: type[StandIn], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hub_model_id: the Hub did not accept 'someone/else'"):
        trainer(tmp_path, push_to_hub=True, hub_model_id="someone/else")


def test_a_recipe_names_the_repository_and_the_services(tmp_path: Path) -> None:
    text = f"model: {{path: x}}\ndata: {{kind: text, path: a.txt}}\ntraining: {{output_dir: {tmp_path}}}\n"
    assert arguments_of(parse_recipe(text)).report_to == []
    options = ["report_to=[tensorboard]", "run_name=one", "push_to_hub=true", "hub_model_id=me/model"]
    args = arguments_of(parse_recipe(text, [f"training.{option}" for option in options]))
    assert (args.report_to, args.run_name) == (["tensorboard"], "one")
    assert (args.push_to_hub, args.hub_model_id, args.hub_private_repo) == (True, "me/model", None)
    with pytest.raises(RecipeError, match=r"hub_model_id is 'me/model' .* push_to_hub is false"):
        parse_recipe(text, ["training.hub_model_id=me/model"])
    with pytest.raises(UserError, match=r"report_to: .*wandbb"):
        trainer(tmp_path, report_to=["wandbb"])
