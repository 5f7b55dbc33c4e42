"""Load and save PEFT adapters in PEFT's own format: one file of tensors and `adapter_config.json`."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from hf_gpipe import strict_json
from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.adapters.peft import PeftAdapter, need_peft, tensor_of
from hf_gpipe.checkpoint.digests import advising, check_tensors
from hf_gpipe.checkpoint.save import write_configuration
from hf_gpipe.checkpoint.weight_files import WHOLE_NUMBERS
from hf_gpipe.errors import CheckpointError, UserError

WEIGHTS_NAME, CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"


def has_adapters(model: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Whether this is a directory with saved adapters, in place of a model."""
    # os.path says no to a name that is none, where pathlib raises an error.
    return isinstance(model, str | os.PathLike) and os.path.isfile(os.path.join(model, CONFIG_NAME))


def base_of(directory: str | os.PathLike[str], peft_config: Any = None) -> str:
    """The model that saved adapters belong to, a Hub id or directory.

    Args:
        directory: of the adapters.
        peft_config: of other adapters, which must be None.

    Raises:
        UserError: there is a `peft_config`, or peft is not installed.
        CheckpointError: the configuration cannot be read, or names no model, or the tensors are not in safetensors.
    """
    if peft_config is not None:
        raise UserError(f"{directory} has saved adapters already; leave peft_config out, or give their base model")
    base = as_config(directory).base_model_name_or_path
    if not isinstance(base, str) or not base:
        file = Path(directory) / CONFIG_NAME
        raise CheckpointError(f"{file} has no base_model_name_or_path, the model that the adapters belong to; add it")
    return base


def as_config(given: Any) -> Any:
    """A PEFT configuration: the given one, or that of a directory of saved adapters, for training on.

    Raises:
        UserError: peft is not installed.
        CheckpointError: the configuration cannot be read, or the tensors are not in safetensors.
    """
    if not isinstance(given, str | os.PathLike):
        return given
    need_peft()
    from peft import PeftConfig

    file = Path(given) / CONFIG_NAME
    strict_json.read(file, dict[str, Any])
    try:
        config = PeftConfig.from_pretrained(str(given))
    except Exception as error:  # of a broken file, peft raises whatever its reading comes upon
        raise CheckpointError(f"cannot read the adapters' configuration {file}: {error}") from error
    if not (Path(given) / WEIGHTS_NAME).is_file():
        raise CheckpointError(f"{given} has no {WEIGHTS_NAME}; save the adapters in safetensors format")
    config.inference_mode = False
    return config


def write_adapter_configuration(adapter: Adapter, folder: Path) -> None:
    """Write the configuration of a model's adapters."""
    assert adapter.peft is not None
    config = copy.deepcopy(adapter.peft.config)
    config.inference_mode = True
    config.base_model_name_or_path = adapter.config.name_or_path or None
    config.save_pretrained(folder)
    if adapter.task_type is not None:  # the names of its classes, which peft's file has not
        write_configuration(adapter, folder)


def load_adapters(directory: Path, models: Mapping[int, StageModel], peft: PeftAdapter) -> None:
    """Copy saved adapters into the stages' adapters, in place.

    Raises CheckpointError if the file is missing or damaged, or lacks one of a stage's tensors.
    """
    file = directory / WEIGHTS_NAME
    of_stages = [list(adapter_tensors(model, peft)) for model in models.values()]
    names = {name for tensors in of_stages for name, _, _ in tensors}
    with advising():
        check_tensors(directory, [WEIGHTS_NAME], names.__contains__)
    with _opened(file) as saved:
        for model, tensors in zip(models.values(), of_stages, strict=True):
            _check_fit(saved, file, {name: model.division.whole_shape(own, tensor) for name, own, tensor in tensors})
            for name, own, tensor in tensors:
                tensor.copy_(model.division.part(own, saved.get_tensor(name)))


def adapter_tensors(model: StageModel, peft: PeftAdapter) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (name in PEFT's files, name in the stage, this rank's part) of each tensor of a stage's adapters."""
    ties = model.model.all_tied_weights_keys
    for saved, own in peft.saved_names(model.model).items():
        yield saved, ties.get(own, own), tensor_of(model.model, own)


def check_adapters(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError unless saved adapters have exactly these tensors, those of all adapters of a model."""
    file = directory / WEIGHTS_NAME
    with _opened(file) as saved:
        _check_fit(saved, file, {name: tensor.shape for name, tensor in tensors.items()})
        if unknown := sorted(set(saved.keys()) - tensors.keys()):
            raise CheckpointError(
                f"{file} has {unknown[0]!r}, which is no adapter of the model that {CONFIG_NAME} describes; give the "
                "model that the adapters were trained on"
            )


def num_tokens_of(directory: Path, model: PreTrainedModel) -> int | None:
    """The tokens of the embedding that was saved with adapters of a model; None: there is none.

    Raises CheckpointError.
    """
    embedding = model.get_input_embeddings()
    name = next(path for path, module in model.named_modules() if module is embedding)
    with _opened(directory / WEIGHTS_NAME) as saved:
        key = f"base_model.model.{name}.weight"
        return saved.get_slice(key).get_shape()[0] if key in set(saved.keys()) else None


def num_labels_of(directory: Path) -> int | None:
    """The classes of the head that was saved with adapters; None: there is none. Raises CheckpointError."""
    with _opened(directory / WEIGHTS_NAME) as saved:
        heads = [name for name in saved.keys() if name.endswith((".score.weight", ".classifier.weight"))]  # noqa: SIM118
        return saved.get_slice(heads[0]).get_shape()[0] if heads else None


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Context manager that opens the saved tensors, of which each is read alone."""
    try:
        with safe_open(file, framework="pt") as saved:
            yield saved
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the adapters in {file}: {error}") from error


def _check_fit(saved: Any, file: Path, shapes: Mapping[str, torch.Size]) -> None:
    names = set(saved.keys())
    for name, own in shapes.items():
        if name not in names:
            raise CheckpointError(f"{file} lacks {name!r}, which the model's adapter has")
        if (shape := tuple(saved.get_slice(name).get_shape())) != own:
            raise CheckpointError(f"{file}: {name!r} has the shape {shape}, the model's adapter has {tuple(own)}")
        if (dtype := saved.get_slice(name).get_dtype()).startswith(WHOLE_NUMBERS):
            raise CheckpointError(f"{file}: {name!r} has the type {dtype}, expected floating-point numbers")
