"""Linear layers that bitsandbytes has quantised to 4 or 8 bits; adapters on them are trained (QLoRA, arXiv 2305.14314).

transformers puts the layers of bitsandbytes into the skeleton, and its loader quantises each weight as soon as it is
read. So a stage never has more than one weight unquantised. `bitsandbytes` is an optional dependency, imported only
where weights are quantised.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters.parts.cuts import Cut
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.libraries.torch import TorchDispatchMode, schema_of, subclass_of
from hf_gpipe.libraries.transformers import (
    AutoHfQuantizer,
    AutoQuantizationConfig,
    is_bitsandbytes_available,
    local_torch_dtype,
)

#: Options of BitsAndBytesConfig that are not supported -> the reason.
_REFUSED = {
    "llm_int8_has_fp16_weight": "its weights are trained in float16, and a pipeline trains no quantised weight",
    "llm_int8_enable_fp32_cpu_offload": "each stage is on one device; choose devices by num_stages and device",
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Weights that share a scale and, with double quantisation, scales that share one: the defaults of bitsandbytes.
_BLOCK, _NESTED_BLOCK = 64, 256
#: Weights that are quantised at a time on the CPU, a multiple of every number of weights that share a scale.
_SLICE = 1 << 18
_QUANTISE_4BIT, _QUANTISE_8BIT = "bitsandbytes::quantize_4bit", "bitsandbytes::int8_vectorwise_quant"


@dataclass(frozen=True)
class Quantisation:
    """How the linear layers of a model are quantised.

    Attributes:
        config: the `transformers.BitsAndBytesConfig`.
        is_done: whether the weights that are loaded are quantised already.
    """

    config: BitsAndBytesConfig
    is_done: bool = False

    def quantizer(self) -> Any:
        """A new quantiser of transformers, which its loader uses."""
        return AutoHfQuantizer.from_config(copy.deepcopy(self.config), pre_quantized=self.is_done)

    def convert(self, model: PreTrainedModel) -> None:
        """Replace the linear layers of a whole model on the meta device by those of bitsandbytes, in place.

        Which layers are left as they are (the head, and what is tied) depends on the whole model, not on a stage.
        """
        quantizer = self.quantizer()
        # As in from_pretrained: transformers 5.17 converts weights to the type that the empty layers have, and then
        # quantises them.
        with local_torch_dtype(model.dtype):
            quantizer.preprocess_model(model=model, dtype=model.dtype, device_map={"": "cpu"})
        quantizer.postprocess_model(model)
        del model.config.quantization_config  # from_pretrained of a saved model would look for quantised weights
        for module in quantised_layers(model):
            _keep_form(module)

    def lay_out(self, model: PreTrainedModel, device: torch.device | str) -> None:
        """Give the layers weights of the quantised form without values, on the meta device or of fake tensors."""
        import bitsandbytes as bnb

        with torch.device(device):
            for module in quantised_layers(model):
                shape = torch.Size((module.out_features, module.in_features))
                weight: Any
                if self.config.load_in_8bit:
                    weight = nn.Parameter(torch.empty(shape, dtype=torch.int8), requires_grad=False)
                    weight.CB, weight.SCB = weight.data, torch.empty(shape[0])
                else:
                    storage = self.config.bnb_4bit_quant_storage
                    packed = torch.empty((shape.numel() + 1) // (2 * storage.itemsize), 1, dtype=storage)
                    weight = nn.Parameter(packed, requires_grad=False)
                    is_nested = self.config.bnb_4bit_use_double_quant
                    blocks = -(-shape.numel() // _BLOCK)
                    state2 = bnb.functional.QuantState(
                        torch.empty(-(-blocks // _NESTED_BLOCK)),
                        blocksize=_NESTED_BLOCK,
                        code=torch.empty(256),
                        dtype=torch.float32,
                    )
                    weight.blocksize, weight.quant_type = _BLOCK, self.config.bnb_4bit_quant_type
                    weight.compress_statistics = is_nested
                    weight.quant_state = bnb.functional.QuantState(
                        torch.empty(blocks, dtype=torch.uint8 if is_nested else torch.float32),
                        shape=shape,
                        code=torch.empty(16),
                        blocksize=_BLOCK,
                        quant_type=self.config.bnb_4bit_quant_type,
                        dtype=model.dtype,
                        offset=torch.empty(()) if is_nested else None,
                        state2=state2 if is_nested else None,
                    )
                    weight.quant_state.as_dict = lambda packed=False: {}  # it would read values
                module.weight = weight

    def undo(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Give the layers unquantised weights on the meta device, to be initialised."""
        for module in quantised_layers(model):
            weight = torch.empty(module.out_features, module.in_features, dtype=dtype, device="meta")
            module.weight = nn.Parameter(weight, requires_grad=False)

    def quantise(self, model: PreTrainedModel) -> None:
        """Quantise the weights of the layers, in place, one after another."""
        import bitsandbytes as bnb

        for module in quantised_layers(model):
            weight = module.weight.data
            if self.config.load_in_8bit:
                module.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False).to(weight.device)
                continue
            module.weight = bnb.nn.Params4bit(
                weight,
                compress_statistics=self.config.bnb_4bit_use_double_quant,
                quant_type=self.config.bnb_4bit_quant_type,
                quant_storage=self.config.bnb_4bit_quant_storage,
                module=module,
            ).to(weight.device)


class BySlices(TorchDispatchMode):
    """Quantises a weight on the CPU slice by slice; blocks and rows are independent, so the result is the same.

    There, bitsandbytes needs up to 18 bytes for each weight that it quantises at once.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, schema_of(func).name
        if name not in (_QUANTISE_4BIT, _QUANTISE_8BIT) or args[0].device.type != "cpu" or args[0].numel() <= _SLICE:
            return func(*args, **kwargs)
        weight = args[0].reshape(-1) if name == _QUANTISE_4BIT else args[0]
        slices = weight.split(_SLICE if weight.dim() == 1 else -(-_SLICE // weight.shape[-1]))
        whole: list[torch.Tensor | None] = []
        ends: list[int] = []
        for piece in slices:
            parts = func(piece, *args[1:], **kwargs)
            if not whole:
                # As many as for the first slice, for each of its weights or rows.
                lengths = [0 if part is None else -(-len(part) * len(weight) // len(piece)) for part in parts]
                whole = [
                    part if part is None else part.new_empty(n, *part.shape[1:])
                    for part, n in zip(parts, lengths, strict=True)
                ]
                ends = [0] * len(parts)
            for index, (result, part) in enumerate(zip(whole, parts, strict=True)):
                if result is not None:
                    result[ends[index] : ends[index] + len(part)] = part
                    ends[index] += len(part)
        return tuple(whole)


def find_quantisation(config: PreTrainedConfig, given: Any, dtype: torch.dtype) -> Quantisation | None:
    """How a model's weights are quantised: as its configuration says, or as they shall be.

    Args:
        config: the model's configuration.
        given: a BitsAndBytesConfig for weights that are not quantised; None: they stay as they are.
        dtype: the type of the weights.

    Raises:
        UnsupportedModelError: the model is quantised in a way that adapters cannot be trained on here.
        UserError: both are quantised, `given` is none of bitsandbytes', or bitsandbytes is not installed.
    """
    own = getattr(config, "quantization_config", None)
    if own is not None and given is not None:
        raise UserError("the model's weights are quantised already; leave quantization_config out")
    if own is None and given is None:
        return None
    asked = given if own is None else own
    try:
        quantization = AutoQuantizationConfig.from_dict(dict(asked)) if isinstance(asked, dict) else asked
    except (ValueError, ImportError) as error:
        raise UnsupportedModelError(f"{config.model_type}: quantization_config: {error}") from error
    if not isinstance(quantization, BitsAndBytesConfig):
        if own is not None:
            method = getattr(quantization.quant_method, "value", quantization.quant_method)
            raise UnsupportedModelError(
                f"{config.model_type}: the weights are quantised by {method}, and adapters are trained on those of "
                "bitsandbytes alone; start from the unquantised checkpoint, with quantization_config"
            )
        raise UserError(
            f"quantization_config is a {type(quantization).__name__}; give a transformers.BitsAndBytesConfig"
        )
    if not (quantization.load_in_4bit or quantization.load_in_8bit):
        raise UserError("quantization_config has load_in_4bit and load_in_8bit false; set one of them to True")
    for name, reason in _REFUSED.items():
        if getattr(quantization, name, False):
            raise UserError(f"quantization_config has {name}=True: {reason}; leave it out")
    if dtype not in _DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise UserError(f"dtype is {str(dtype).removeprefix('torch.')}; bitsandbytes quantises weights in {names}")
    need_bitsandbytes()
    return Quantisation(quantization, is_done=own is not None)


def need_bitsandbytes() -> None:
    """Raise UserError where bitsandbytes is not installed."""
    if not is_bitsandbytes_available():
        raise UserError("quantised weights need the package bitsandbytes: pip install 'hf_gpipe[quantised]'")


def quantised_layers(model: nn.Module) -> Iterator[Any]:
    """The layers of bitsandbytes in a model."""
    import bitsandbytes as bnb

    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    yield from (module for module in model.modules() if isinstance(module, kinds))


def is_4bit(parameter: torch.Tensor) -> bool:
    """Whether a parameter has weights of 4 bits."""
    return getattr(parameter, "quant_state", None) is not None


def part_of_4bit(parameter: Any, cut: Cut, place: int) -> nn.Parameter:
    """A rank's part of a quantised weight, whole blocks of it, with the same values.

    Its scales are in float32, for scales of a scale lie in several parts.

    Args:
        parameter: the quantised weight. Each rank has whole blocks of it, as `plan_of` checks.
        cut: the cut of the weight (outputs, inputs).
        place: the rank's place among the ranks.
    """
    import bitsandbytes as bnb

    state = parameter.quant_state
    scales = state.absmax
    if state.nested:
        scales = bnb.functional.dequantize_blockwise(scales, state.state2) + state.offset

    def part_of(grid: torch.Tensor, size: int) -> torch.Tensor:
        """Return the rank's part of a tensor with an entry for each `size` inputs."""
        of_grid = cut if cut.dim == 0 else cut.of_groups(size)
        return of_grid.part(grid.reshape(state.shape[0], -1), place).contiguous()

    packed = part_of(parameter.data.view(torch.uint8), 2).view(-1, 1).view(parameter.dtype)
    part: Any = subclass_of(type(parameter), packed)
    vars(part).update(vars(parameter))
    part.quant_state = copy.copy(state)
    part.quant_state.absmax = part_of(scales, state.blocksize).flatten()
    part.quant_state.shape = cut.part(torch.empty(state.shape, device="meta"), place).shape
    part.quant_state.nested, part.quant_state.state2, part.quant_state.offset = False, None, None
    if getattr(part, "module", None) is not None:
        part.module.quant_state = part.quant_state
    result: nn.Parameter = part
    return result


def size_of_quantised(parameter: torch.Tensor) -> tuple[int, int]:
    """Return the number of weights that a parameter stands for, and the bytes of it and its scales."""
    scales: list[torch.Tensor] = []
    count = parameter.numel()
    if (state := getattr(parameter, "quant_state", None)) is not None:
        count = state.shape.numel()
        scales = [state.absmax, *([state.state2.absmax] if state.nested else [])]
    elif (scale := getattr(parameter, "SCB", None)) is not None:
        scales = [scale]
    return count, parameter.nbytes + sum(scale.nbytes for scale in scales)


def _keep_form(module: Any) -> None:
    """Keep bitsandbytes from changing the form of a weight in evaluation, as it does on CPUs with AVX512-BF16.

    From that form no gradient is computed, also in the training after it.
    """
    if hasattr(module, "support_avx512bf16_for_cpu"):
        module.support_avx512bf16_for_cpu = False


def restore(module: nn.Module) -> None:
    """Undo what a forward of bitsandbytes has done to a quantised layer's weight, in place, and from now on keep it."""
    weight: Any = getattr(module, "weight", None)
    if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
        module.state_dict()  # unpacks it
    _keep_form(module)
    state: Any = getattr(module, "state", None)
    if hasattr(weight, "SCB") and weight.SCB is None:
        weight.CB, weight.SCB = weight.data, state.SCB
