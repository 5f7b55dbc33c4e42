"""How the layers that peft adds are divided: from the layers of the plain model that they stand beside.

LoRA (Hu et al. 2021, arXiv 2106.09685) has two factors. Beside a column layer the first is whole, and the second is a
column layer. Beside a row layer the first is a row layer, and the second is whole. So each sum of a layer is joined by
another sum, of the width of LoRA's rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_gpipe.adapters.base import Adapter
from hf_gpipe.adapters.modules.quantised import quantised_layers
from hf_gpipe.adapters.peft import PeftAdapter
from hf_gpipe.errors import UserError
from hf_gpipe.modes.tensor_parallel.plan import SplitPlan

#: The plans of a model, by the number of ranks and whether it has adapters: every stage needs the whole model's plan.
_plans: WeakKeyDictionary[Adapter, dict[tuple[int, bool], SplitPlan]] = WeakKeyDictionary()


def plan_of(adapter: Adapter, size: int) -> SplitPlan:
    """The plan for T ranks of a model with its adapters, if it has some; it is made once.

    Raises:
        UnsupportedModelError: the blocks have a layer of which no table says how it is divided.
        UserError: the model has fewer heads or columns than ranks, or its adapters are no plain LoRA.
    """
    plans, key = _plans.setdefault(adapter, {}), (size, adapter.peft is None)
    if key not in plans:
        plan = SplitPlan.of(adapter, size)
        if adapter.quantisation is not None:
            _check_quantised(plan, adapter.reference)
        if adapter.peft is not None:
            whole = adapter.skeleton()
            adapter.lay_out(whole)
            plan = _Adapted(plan, adapter.peft, whole).plan
        plans[key] = plan
    return plans[key]


def _check_quantised(plan: SplitPlan, model: PreTrainedModel) -> None:
    """Raise UserError where a cut of quantised weights goes through a block of them."""
    layers = {id(module) for module in quantised_layers(model)}
    for name, part in sorted(plan.modules.items()):
        module: Any = model.get_submodule(name)
        if id(module) not in layers:
            continue
        if not hasattr(module.weight, "blocksize"):
            raise UserError(
                "quantization_config has 8 bits, whose layers quantise the inputs of whole rows; use 4 bits"
            )
        runs = [(0, module.in_features)]
        if part == "row":
            runs += [run for own in plan.cuts[f"{name}.weight"].parts for run in own]
        size = module.weight.blocksize
        if any(end % size for run in runs for end in run):
            raise UserError(
                f"{name!r} has {module.in_features} inputs, whose weights of 4 bits are quantised {size} at a time; "
                "each rank needs whole blocks, so use fewer ranks, leave quantization_config out"
            )


class _Adapted:
    """The plan of a model with adapters, from that of the plain model and the whole model with its adapters."""

    def __init__(self, plain: SplitPlan, peft: PeftAdapter, whole: PreTrainedModel) -> None:
        from peft import PeftType

        from hf_gpipe.libraries.peft import BaseTunerLayer

        self._plain, self._peft = plain, peft
        if peft.config.peft_type != PeftType.LORA:
            raise self._error(f"peft_type {peft.config.peft_type.value}")
        layers: dict[str, Any] = {n: m for n, m in whole.named_modules() if isinstance(m, BaseTunerLayer)}
        #: The names that a module of the plain model has now, by its name there.
        self._places: dict[str, tuple[str, ...]] = {name: (f"{name}.base_layer",) for name in layers}
        for wrapped in peft.wrapped:
            copies = (f"{wrapped.module}.original_module", f"{wrapped.module}.modules_to_save.{peft.name}")
            if wrapped.tokens is None:
                self._places[wrapped.module] = copies
            elif wrapped.module in plain.weights:
                raise self._error("trainable_token_indices, the rows of a table that is divided")
        self.plan = replace(
            plain,
            cuts={self._tied(now): cut for name, cut in plain.cuts.items() for now in self._now(name)},
            modules={now: part for name, part in plain.modules.items() for now in self._now(name)},
            weights={now: self._tied(f"{now}.weight") for name in plain.weights for now in self._now(name)},
            units={now: units for name, units in plain.units.items() for now in self._now(name)},
            heads_of={now: heads for name, heads in plain.heads_of.items() for now in self._now(name)},
            shared={now for name in plain.shared for now in self._now(name)},
        )
        for name, weight in plain.weights.items():
            self.plan.cuts |= {self._tied(f"{now}.weight"): plain.cuts[weight] for now in self._now(name)}
        for name, layer in layers.items():
            self._divide(name, layer)

    def _now(self, name: str) -> tuple[str, ...]:
        """The names that a module or a parameter of the plain model has now."""
        for end in range(name.count(".") + 1):
            module = name.rsplit(".", end)[0]
            if (places := self._places.get(module)) is not None:
                return tuple(place + name.removeprefix(module) for place in places)
        return (name,)

    def _tied(self, name: str) -> str:
        return self._peft.ties.get(name, name)

    def _divide(self, name: str, layer: Any) -> None:
        """Plan for the adapter of a layer."""
        from hf_gpipe.libraries.peft import LoraEmbedding

        plan, own, part = self.plan, self._peft.name, self._plain.modules.get(name)
        if layer.lora_variant:
            raise self._error(f"{type(layer.lora_variant[own]).__name__.removesuffix('Variant')}, a form of LoRA")
        if part in ("column", "row"):
            cut = self._plain.cuts[f"{name}.weight"]
            if part == "row":
                plan.modules[first := f"{name}.lora_A.{own}"] = "row"
                plan.cuts[f"{first}.weight"] = replace(cut, dim=1)
                return
            plan.modules[second := f"{name}.lora_B.{own}"] = "column"
            added = {
                f"{second}.{parameter}": replace(cut, dim=0) for parameter, _ in layer.lora_B[own].named_parameters()
            }
            plan.cuts |= added
            if cut.is_shared:
                plan.shared |= added.keys()
        elif part == "table" and isinstance(layer, LoraEmbedding):
            cut = self._plain.cuts[self._plain.weights[name]]
            plan.cuts[f"{name}.lora_embedding_A.{own}"] = replace(cut, dim=1)
        elif part == "experts":
            raise self._error("target_parameters, matrices of experts")

    def _error(self, what: str) -> UserError:
        return UserError(
            f"peft_config has {what}, which no rule divides; use plain LoRA on linear layers and embeddings"
        )
