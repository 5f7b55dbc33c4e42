"""Merge saved PEFT adapters into the weights of their model, a few layers at a time.

The layers of a shard are a stage, which reads its own weights alone, and PEFT merges there. So the memory is that of
one shard, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.auto_classes import SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION
from hf_gpipe.adapters.classifiers import as_classifier
from hf_gpipe.adapters.peft import tensor_of
from hf_gpipe.adapters.stage_model import StageModel
from hf_gpipe.adapters.token_classifiers import as_token_classifier
from hf_gpipe.checkpoint import digests
from hf_gpipe.checkpoint.configuration import read_config
from hf_gpipe.checkpoint.peft import as_config, check_adapters, load_adapters, num_labels_of
from hf_gpipe.checkpoint.save import complete_model, write_configuration, write_files, write_shard, written_whole
from hf_gpipe.checkpoint.writer import in_hub_form
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.job.world import World
from hf_gpipe.libraries.transformers import CONFIG_NAME, unsaved_keys
from hf_gpipe.model.assembly import assemble
from hf_gpipe.model.opening import open_model
from hf_gpipe.model.spec import ModelSpec

#: Bytes of a shard, and so of the weights in memory; a layer that is larger is a shard by itself.
SHARD_BYTES = 1 << 30

_CPU = torch.device("cpu")


def merge(
    spec: ModelSpec,
    output: Path,
    write_more: Callable[[Path], Any] | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a model with its saved adapters merged into its weights, as peft's `merge_and_unload` merges them.

    Args:
        spec: of a model with saved adapters.
        output: a new or empty directory. After a crash it is not there.
        write_more: a function of `checkpoint.save.write_files`.
        shard_bytes: of the weights that are in memory together.

    Returns:
        The number of shards.

    Raises:
        UserError: the weights are quantised, a tied weight would get adapters of one of its uses, or `output` has
            files.
        CheckpointError: a file is missing or damaged, or does not fit the model, or `output` cannot be written.
    """
    directory, output = Path(str(spec.saved_adapters)), output.absolute()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is there already and is not an empty directory; choose another output")
    adapter = open_model(spec, _CPU)
    assert adapter.peft is not None, "the spec has saved adapters"
    if adapter.quantisation is not None:
        raise UserError(
            f"the weights at {str(spec.model)!r} are quantised, and merging would round them once more; give the model "
            "that is not quantised as the base"
        )
    whole = adapter.skeleton()
    adapter.lay_out(whole)
    names = adapter.peft.saved_names(whole)
    check_adapters(directory, {saved: tensor_of(whole, name) for saved, name in names.items()})
    _check_ties(adapter, whole)
    adapter.peft.merge(whole)
    merged = _Merged.of(adapter, whole)
    if {*adapter.ties} & merged.layer_of.keys():  # peft too unties an embedding and a head that were trained apart
        adapter.reference.config.tie_word_embeddings = False
    shards = merged.shards(shard_bytes)
    with written_whole(output, World.current()) as temporary:
        write_files(temporary, lambda folder: write_configuration(adapter, folder), write_more)
        written = {}
        for number, layers in enumerate(shards):
            stage = assemble(adapter, layers, spec.model, _CPU)
            load_adapters(directory, {number: stage}, adapter.peft)
            adapter.peft.merge(stage.model)
            tensors = in_hub_form(stage, merged.tensors(stage))
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            written[file] = write_shard(temporary / file, tensors)
            del stage, tensors
        digests.write(temporary, complete_model(temporary, written))
    return len(shards)


def classifier_fields(
    base: str, directory: Path, pad_token_id: Callable[[], int | None], *, trust_remote_code: bool = False
) -> dict[str, Any] | None:
    """The values that make the configuration of a language model that of its adapters' classifier.

    Args:
        base: the model's Hub id or directory.
        directory: of the adapters; a config.json beside them has the names of the classes.
        pad_token_id: gives the tokenizer's, for a model that has none.
        trust_remote_code: whether code beside the configuration may be run.

    Returns:
        None where the adapters are not of a classifier, or `base` is one.

    Raises:
        UserError: transformers has no such classifier, or the adapters have no head.
        CheckpointError: a file cannot be read.
    """
    task_type = as_config(directory).task_type
    if task_type not in ("SEQ_CLS", "TOKEN_CLS"):
        return None
    config = read_config(base, trust_remote_code=trust_remote_code)
    if SEQUENCE_CLASSIFICATION.named_by(config) or TOKEN_CLASSIFICATION.named_by(config):
        return None
    if (num_labels := num_labels_of(directory)) is None:
        raise UnsupportedModelError(
            f"{directory}: task_type is {task_type}, and the adapters have no head; give the classifier as the base"
        )
    labels, problem = [f"LABEL_{number}" for number in range(num_labels)], None
    if (directory / CONFIG_NAME).is_file():
        saved = read_config(directory)
        labels = [str(saved.id2label.get(number, label)) for number, label in enumerate(labels)]
        problem = saved.problem_type
    if task_type == "TOKEN_CLS":
        return as_token_classifier(config, labels)
    has_padding = config.get_text_config().pad_token_id is not None
    return as_classifier(config, labels, None if has_padding else pad_token_id(), problem)


@dataclass(frozen=True)
class _Merged:
    """The tensors of a merged model: each once, with the layer that has it and its size."""

    adapter: Adapter
    layer_of: dict[str, int] = field(default_factory=dict)
    bytes_of_layer: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, adapter: Adapter, whole: Any) -> _Merged:
        """Make it of the merged model on the meta device. A tied tensor belongs to the lowest layer that has it."""
        merged, ignored = cls(adapter), unsaved_keys(whole)
        names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in whole.state_dict(keep_vars=True).items():
            if name not in ignored:
                names.setdefault(tensor, []).append(name)
        for tensor, same in names.items():
            layer = min(map(adapter.layer_of, same))
            in_layer = [name for name in same if adapter.layer_of(name) == layer]
            source = next((name for name in in_layer if name not in adapter.ties), in_layer[0])
            merged.layer_of[source] = layer
            merged.bytes_of_layer[layer] = merged.bytes_of_layer.get(layer, 0) + tensor.nbytes
        return merged

    def shards(self, most: int) -> list[range]:
        """The layers of each shard: as many as have `most` bytes together, and at least one."""
        starts, held = [0], 0
        for layer in range(len(self.adapter.layers)):
            own = self.bytes_of_layer.get(layer, 0)
            if held and held + own > most:
                starts.append(layer)
                held = 0
            held += own
        return [range(*ends) for ends in zip(starts, [*starts[1:], len(self.adapter.layers)], strict=True)]

    def tensors(self, stage: StageModel) -> dict[str, torch.Tensor]:
        """The tensors of a merged stage, by name."""
        held = stage.model.state_dict()
        return {name: held[name] for name, at in self.layer_of.items() if stage.start <= at < stage.stop}


def _check_ties(adapter: Adapter, whole: nn.Module) -> None:
    """Raise UnsupportedModelError where a weight with several uses has adapters that are of some of them.

    After merging, all uses would be changed. Copies that are trained whole, and tokens that are trained in all uses,
    are merged as they were used.
    """
    from hf_gpipe.libraries.peft import BaseTunerLayer

    assert adapter.peft is not None
    users: dict[nn.Parameter, list[str]] = {}
    layers = {name: module for name, module in whole.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    together = {wrapped.module for wrapped in adapter.peft.wrapped if wrapped.tied_to is not None}
    together |= {wrapped.tied_to for wrapped in adapter.peft.wrapped if wrapped.tied_to is not None}
    for name, layer in layers.items():
        base: Any = layer.get_base_layer()
        for weight in base.parameters(recurse=False):
            if len(same := users[weight]) > 1 and name.removesuffix(".token_adapter") not in together:
                raise UnsupportedModelError(
                    f"{adapter.config.model_type}: {name!r} has adapters, and its weight is also "
                    f"{next(other for other in same if not other.startswith(name))!r} (tie_word_embeddings): merged, "
                    "they would change both uses; use the adapters as they are, with peft or `hf-gpipe generate`"
                )
