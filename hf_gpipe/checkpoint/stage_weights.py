"""Weights of a stage: initialise them, take them from a model in memory, or read them from Hub format.

transformers' loading functions (`libraries/transformers.py`) run on the stage's own model, in which the layers of
other stages are stubs. So only the stage's tensors are read into memory, and the library's
conversions of keys apply unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.feed_forward import divide_by_depth
from hf_gpipe.adapters.guards import check_hooks, take_attributes, take_hooks
from hf_gpipe.adapters.modules.dropout import default_generator, keeping_random_numbers, key, mix
from hf_gpipe.adapters.modules.quantised import BySlices, quantised_layers, restore
from hf_gpipe.adapters.peft import PeftAdapter
from hf_gpipe.adapters.stage_model import StageModel
from hf_gpipe.checkpoint.digests import Digests, advising
from hf_gpipe.checkpoint.weight_files import (
    OF_QUANTISATION,
    mapped_tensors,
    names_of_tensors,
    opened_weights,
    weight_files,
)
from hf_gpipe.errors import CheckpointError, listed
from hf_gpipe.libraries.torch import TorchDispatchMode, buffers_of, parameters_of, schema_of
from hf_gpipe.libraries.transformers import (
    SAFE_WEIGHTS_INDEX_NAME,
    WeightConverter,
    WeightRenaming,
    allocate,
    drop_expected_keys,
    fill_module,
    fill_unmarked,
    forget_initialisation,
    get_model_conversion_mapping,
    load_files,
    rename_source_key,
)


class _SeededByName(TorchDispatchMode):
    """Draws random fills on the CPU, whose generator it seeds before each of a parameter from (seed, its name).

    So a parameter gets the same values in any order of initialisation, on any stage and on any device: on CUDA the same
    seed gives other values, and large tensors of GPUs of different models differ too. In half precision it gets the
    rounded values of float32, which torch 2.11 draws six times as fast. A random fill of a tensor that is not a
    parameter continues from the previous seed. The state of the generator is restored at the end.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        super().__init__()
        self._model = model
        self._seed = seed

    def __enter__(self) -> Self:
        self._state = torch.default_generator.get_state()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.default_generator.set_state(self._state)

    @cached_property
    def _names(self) -> dict[int, str]:
        """Names by address; computed at the first fill, when every tensor has its memory."""
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {t.untyped_storage().data_ptr(): name for name, t in named if t.device.type != "meta"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_random = torch.Tag.nondeterministic_seeded in func.tags and args and isinstance(args[0], torch.Tensor)
        if not is_random or args[0].device.type == "meta":
            return func(*args, **kwargs)
        tensor, *others = args
        name = self._names.get(tensor.untyped_storage().data_ptr())
        if name is not None:
            torch.default_generator.manual_seed(mix(self._seed, key(name), int(tensor.storage_offset())))
        if not schema_of(func).is_mutable:
            return func(tensor.cpu(), *others, **kwargs).to(tensor.device)
        is_half = tensor.is_floating_point() and tensor.itemsize == 2
        if tensor.device.type == "cpu" and not is_half:
            return func(tensor, *others, **kwargs)
        return tensor.copy_(func(tensor.to("cpu", torch.float32 if is_half else tensor.dtype), *others, **kwargs))


def initialise(stage: StageModel, device: torch.device, seed: int) -> None:
    """Initialise the weights of a stage. They depend on (seed, parameter's name) and the model, and nothing else."""
    model, quantisation = stage.model, stage.adapter.quantisation
    if quantisation is not None:
        quantisation.undo(model, stage.adapter.dtype)
    forget_initialisation(model)
    # Getting memory makes every parameter trainable; some are not, such as Marian's table of positions.
    frozen = [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad]
    allocate(model, device)
    with _SeededByName(model, seed):
        fill_unmarked(model)
    model.tie_weights(recompute_mapping=False)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    divide_by_depth(stage)
    if quantisation is not None:
        with BySlices():
            quantisation.quantise(model)


def take(stage: StageModel, source: torch.nn.Module, device: torch.device) -> None:
    """Give a stage the weights of a model in memory, its attributes that need not be configured, and its functions.

    On the same device weights are shared.
    """
    model = stage.model
    if stage.adapter.quantisation is not None:
        for module in quantised_layers(source):
            restore(module)
    tensors: dict[str, torch.Tensor] = dict(source.named_parameters(remove_duplicate=False))
    tensors |= dict(source.named_buffers(remove_duplicate=False))
    # By the source's parameter, so that tied parameters stay tied on another device.
    parameters: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    layers, ties = range(stage.start, stage.stop), stage.adapter.ties
    for name in [name for name, _ in named]:
        if name not in tensors:
            raise CheckpointError(f"the given model has no {name!r}, which its configuration asks for")
        same = [ties.get(name, name), *(alias for alias, source in ties.items() if source == ties.get(name, name))]
        if any(stage.adapter.layer_of(one) not in layers for one in same):
            check_hooks(name, tensors[name], "a stage, and it is tied over several")
        parent, _, leaf = name.rpartition(".")
        module, tensor = modules[parent], tensors[name]
        if isinstance(tensor, torch.nn.Parameter):
            if tensor not in parameters:
                # A quantised parameter stays one, with its scales; `to` would copy it also on the same device.
                moved: Any = tensor if tensor.device == device else tensor.to(device)
                is_one = isinstance(moved, torch.nn.Parameter)
                parameters[tensor] = moved if is_one else torch.nn.Parameter(moved.data, tensor.requires_grad)
                take_hooks(parameters[tensor], tensor)
            setattr(module, leaf, parameters[tensor])
            if parameters[tensor] is tensor and hasattr(tensor, "SCB"):
                # The first forward moves the scales of an 8-bit weight there; the given model needs them too.
                module.state = source.get_submodule(parent).state
        else:
            setattr(module, leaf, tensor.to(device))
    _renew_kept(stage)
    if any(t.device.type == "meta" for t in model.state_dict().values()):
        raise CheckpointError("the given model is on the meta device and has no weights")
    take_attributes(model, source)
    for patch in stage.adapter.patches:
        if any(patch.layer in layer.all_modules for layer in stage.layers):
            patch.put(model, source)


def _renew_kept(stage: StageModel) -> None:
    """Give buffers that forwards change the values of a new model; those of a model in memory may have changed."""
    roots = [(name, module) for name, module in stage.model.named_modules() if isinstance(module, PreTrainedModel)]
    for name, module in stage.model.named_modules():
        kept = stage.adapter.kept.get(type(module).__name__, frozenset())
        if not (kept & buffers_of(module).keys()):
            continue
        # A forward may have changed their type too, which is that of the others.
        dtypes = {buffer.dtype for n, buffer in module.named_buffers(recurse=False) if n not in kept}
        for own, buffer in list(module.named_buffers(recurse=False)):
            same = buffer.is_floating_point() and len(dtypes) == 1
            buffers_of(module)[own] = buffer.to(next(iter(dtypes)) if same else buffer.dtype, copy=True)
        if next(module.parameters(), None) is None:
            owner = [root for prefix, root in roots if f"{name}.".startswith(f"{prefix}." if prefix else "")][-1]
            fill_module(owner, module)


def load(
    stage: StageModel, path: str | os.PathLike[str], device: torch.device, seed: int, *, maps_files: bool = False
) -> None:
    """Read a stage's weights from a Hub directory or id: lazily, only the stage's own tensors.

    With `maps_files` the tensors on the CPU are the mapped files, which must then not be written to in place.

    Raises CheckpointError if the files are missing, damaged, do not fit the model or lack a parameter of this stage.
    """
    _read(stage, path, device, seed)
    if not maps_files:
        leave_files(stage, device)


def leave_files(stage: StageModel, device: torch.device) -> None:
    """Copy tensors on the CPU that are mapped files: weights must not depend on a file that may be replaced."""
    if device.type != "cpu":
        return
    quantisation = stage.adapter.quantisation
    is_new = quantisation is not None and not quantisation.is_done
    own = {id(layer.weight) for layer in quantised_layers(stage.model)} if is_new else set()
    for tensor in {id(t): t for t in stage.model.state_dict(keep_vars=True).values() if id(t) not in own}.values():
        tensor.data = tensor.data.clone()
        if hasattr(tensor, "CB"):  # of an 8-bit weight: the same memory
            tensor.CB = tensor.data


def reload(stage: StageModel, path: str | os.PathLike[str], seed: int) -> None:
    """Replace the weights of a sealed stage by those of a Hub directory or id, in place. Raises errors like `load`.

    The files are mapped and copied tensor by tensor, so there is no second copy of the stage in memory. Only tensors
    that the library converts, to another type or to fused experts, need memory of their own.
    """
    current = {**stage.parameters, **stage.buffers}
    if isinstance(stage.model, PreTrainedModel):
        tensors: dict[str, torch.Tensor] = {}
        for own in (stage,) if stage.head is None else (stage.head, stage):
            mapped = StageModel(stage.adapter, own.start, own.stop)
            _read(mapped, path, torch.device("cpu"), seed)
            mapped.seal(torch.device("cpu"))
            read = {**mapped.parameters, **mapped.buffers}
            tensors |= {name: tensor for name, tensor in read.items() if name in current}
    else:
        tensors = _mapped(path, current)
    with torch.no_grad():
        for name, tensor in tensors.items():
            current[name].copy_(stage.division.part(name, tensor))


def _mapped(path: str | os.PathLike[str], current: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint under the names that it has, on the CPU, in place of `current`."""
    files = weight_files(path, current.__contains__)
    _check(Path(path), files, current.__contains__)
    mapped = mapped_tensors(path, files, current)
    for name, tensor in current.items():
        if name not in mapped or mapped[name].shape != tensor.shape:
            shape = f"{name} with the shape {tuple(tensor.shape)}"
            raise CheckpointError(f"the checkpoint {str(path)!r} does not fit the model: it has no {shape}")
    return mapped


def _read(stage: StageModel, path: str | os.PathLike[str], device: torch.device, seed: int) -> None:
    """Like `load`, but on the CPU the tensors are the mapped files."""
    model, quantisation = stage.model, stage.adapter.quantisation
    quantizer = None if quantisation is None else quantisation.quantizer()
    state, renamed = model.state_dict(), _renaming(model, quantizer)

    def is_own(key: str) -> bool:
        return renamed(key) in state

    files = weight_files(path, is_own)
    _check(Path(path), files, is_own)
    if quantisation is None or not quantisation.is_done:
        _check_types(model, renamed, path, files)
    forget_initialisation(model)
    info, extended = None, stage.adapter.extended
    try:
        with quiet(), _SeededByName(model, seed), BySlices():
            where, dtype = str(path), stage.adapter.dtype
            loading = load_files(model, files, where, device, dtype, quantizer, accepts_shapes=bool(extended))
            info = next(loading)
            info = next(loading)
        if odd := {name for name, *_ in info.mismatched_keys} - extended:
            raise RuntimeError(f"{min(odd)} has another shape")
    except (RuntimeError, OSError, SafetensorError) as error:
        # The library's message names its report, which has the tensors of other stages too and is not shown.
        keys = () if info is None else info.mismatched_keys
        shapes = sorted(key for key in keys if key[0] not in extended)
        named = [f"{name} has the shape {tuple(theirs)}, the model's {tuple(own)}" for name, theirs, own in shapes]
        reason = listed(named, 3) or error
        raise CheckpointError(f"the checkpoint {str(path)!r} does not fit the model: {reason}") from error
    head = tuple(f"{module}." for module in stage.adapter.layers[-1].modules)
    missing = {name for name in info.missing_keys if not (stage.adapter.may_lack_head and name.startswith(head))}
    if missing:
        names = ", ".join(sorted(missing)[:5])
        raise CheckpointError(f"the checkpoint {str(path)!r} lacks {len(missing)} parameters of the model: {names}")


def add_peft(stage: StageModel, peft: PeftAdapter, device: torch.device, seed: int) -> None:
    """Put new PEFT layers into a stage that has its weights.

    Their values depend on the weights of the layers they belong to, on (seed, parameter's name), and nothing else.
    """
    # PEFT draws the values of some methods while it makes their layers, on the CPU.
    devices = {torch.device("cpu"), device}

    def plant(name: str) -> None:
        for own in devices:
            default_generator(own).manual_seed(mix(seed, key(name)))

    from hf_gpipe.libraries.peft import before_each_layer

    with keeping_random_numbers(devices):
        with before_each_layer(peft.config.peft_type, plant):
            peft.inject(stage.model)
        with _SeededByName(stage.model, seed):
            peft.reset(stage.model, plant)


def unexpected_tensors(adapter: Adapter, path: str | os.PathLike[str]) -> list[str]:
    """The tensors of a Hub directory or id that the model does not have, where transformers would warn of them.

    Raises CheckpointError where the files are missing or damaged, or where a layer could have the tensor, such as a
    bias that the configuration turns off: the model would compute something else.
    """
    model, quantisation = adapter.reference, adapter.quantisation
    keys = names_of_tensors(path)
    state = model.state_dict()
    renamed = _renaming(model, None if quantisation is None else quantisation.quantizer())
    info = SimpleNamespace(missing_keys=set(), unexpected_keys={renamed(key) for key in keys} - state.keys())
    drop_expected_keys(model, info)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in sorted(info.unexpected_keys):
        module, _, leaf = name.rpartition(".")
        if module in modules and leaf in parameters_of(modules[module]):
            raise CheckpointError(
                f"the checkpoint {str(path)!r} has {name}, which the model's configuration turns off; correct the "
                "configuration, such as its attention_bias, or give a checkpoint without it"
            )
    return sorted(info.unexpected_keys)


def _check_types(
    model: PreTrainedModel, renamed: Callable[[str], str], path: str | os.PathLike[str], files: Sequence[Path]
) -> None:
    """Raise CheckpointError for whole numbers or 8 bits in place of weights: a quantisation that config.json omits."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for file in files:
        with opened_weights(path, file) as opened:
            for key in opened.keys():  # noqa: SIM118  (not a mapping)
                own = parameters.get(name := renamed(key))
                dtype = opened.get_slice(key).get_dtype()
                if own is not None and own.is_floating_point() and dtype.startswith(OF_QUANTISATION):
                    raise CheckpointError(
                        f"the checkpoint {str(path)!r} does not fit the model: {name} has the type {dtype}, expected "
                        "floating-point numbers of 16 bits or more; give the checkpoint before it was converted, or "
                        "the config.json with its quantization_config"
                    )


def _check(directory: Path, files: Sequence[Path], is_own: Callable[[str], bool]) -> None:
    """Check the headers and own tensors of files by their digests, if there are. Raises CheckpointError for damage."""
    with advising():
        digests = Digests.read(directory)
        if digests is not None:
            index = [SAFE_WEIGHTS_INDEX_NAME] if SAFE_WEIGHTS_INDEX_NAME in digests.files else []
            names = [*index, *(file.name for file in files)]
            digests.check(part for name in names for part in digests.parts(name, is_own))


def _renaming(model: PreTrainedModel, quantizer: Any) -> Callable[[str], str]:
    """Return a function: the name of a checkpoint's tensor in a model, by the library's conversions."""
    state = model.state_dict()
    # A new mapping: entries record that they were used, and saving reverts the used ones.
    mapping = get_model_conversion_mapping(model, hf_quantizer=quantizer)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]

    def renamed(key: str) -> str:
        return key if key in state else rename_source_key(key, renamings, converters, model.base_model_prefix, state)[0]

    return renamed


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager that turns off the loading report, which lists other stages' tensors as unexpected."""
    verbosity = transformers_logging.get_verbosity()
    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shows_progress:
            transformers_logging.enable_progress_bar()
