"""Which layers of a model are divided among the ranks of a worker, and how: by the names that families give them.

Another family is an entry of the tables below. A tiny clone then says whether its division is exact
(model/tensor_parallel.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_gpipe.adapters.base import Adapter
from hf_gpipe.adapters.tensor_parallel.cuts import Cut
from hf_gpipe.errors import UnsupportedModelError, UserError

Kind = Literal["query", "key or value", "query, key and value", "heads of three", "width", "two widths", "row"]


def _names(kind: Kind, *names: str) -> dict[str, Kind]:
    return dict.fromkeys(names, kind)


#: The linear layers of blocks by the last part of their names, or the last two. A column layer has a part of the
#: outputs, in whole heads or not. A row layer, which reads what column layers have made, has a part of the inputs.
KINDS: Mapping[str, Kind] = {
    **_names("query", "q_proj", "q", "query"),
    **_names("key or value", "k_proj", "v_proj", "k", "v", "key", "value"),
    # One after the other in one matrix: q, k and v of all heads, or of each head its three.
    **_names("query, key and value", "c_attn", "qkv_proj"),
    **_names("heads of three", "query_key_value"),
    **_names("width", "gate_proj", "up_proj", "fc1", "fc_in", "c_fc", "wi", "wi_0", "wi_1", "dense_h_to_4h"),
    **_names("width", "intermediate.dense"),
    **_names("two widths", "gate_up_proj"),
    **_names("row", "o_proj", "out_proj", "o", "dense", "c_proj"),
    **_names("row", "down_proj", "fc2", "fc_out", "wo", "dense_4h_to_h"),
}
#: Layers that stay whole: routers of experts, and the gate of a shared one.
_WHOLE = ("gate", "router", "shared_expert_gate", "classifier")
#: Matrices of experts, (E, rows, columns): the packs of the rows or columns that are cut, and their dimension.
_OF_EXPERTS = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}
#: Embeddings with a column for each head, in an attention.
_OF_HEADS = ("relative_attention_bias",)
#: Buffers with a column for each token of the vocabulary.
_OF_VOCABULARY = ("final_logits_bias",)
#: Attributes of an attention: the width of a head; the numbers of heads and of key-value heads; the width of all heads.
_HEAD_WIDTHS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
_ALL_WIDTHS = ("inner_dim", "split_size", "embed_dim", "all_head_size")
_GROUPS = "num_key_value_groups"


class _Pack(NamedTuple):
    """A run of outputs, in so many units that stay whole; with fewer units than ranks, ranks may share one."""

    length: int
    units: int
    what: str = "columns"
    may_share: bool = False


@dataclass
class SplitPlan:
    """The divided layers of a model, by their names in it.

    Attributes:
        size: T, the ranks of a worker.
        cuts: of each divided parameter or buffer, under its own name, and not that of an alias.
        columns, rows: linear layers of blocks.
        experts: modules with the matrices of experts, of which each rank has a part of every expert.
        tables: embeddings of tokens that have a part of the vocabulary, each with the name of its weight.
        heads: linear layers that make the logits of a part of the vocabulary, each with the name of its weight.
        attributes: of each attention the values of a rank's part, for those of these attributes that it has.
        shared: parameters that several ranks have alike and use for their own heads: their gradients are summed.
    """

    size: int
    cuts: dict[str, Cut] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    tables: dict[str, str] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, adapter: Adapter, size: int) -> SplitPlan:
        """The plan for T ranks.

        Raises:
            UnsupportedModelError: the blocks have a layer of which no table says how it is divided.
            UserError: the model's heads or widths cannot be divided by T.
        """
        plan, model = cls(size), adapter.reference
        blocks = tuple(f"{block}." for stack in adapter.stacks for block in stack.blocks)
        for name, module in model.named_modules():
            if not name.startswith(blocks):
                continue
            if isinstance(module, nn.Linear | Conv1D):
                plan._divide(model, name, module)
            elif all(isinstance(getattr(module, own, None), nn.Parameter) for own in _OF_EXPERTS):
                plan._divide_experts(name, module)
            elif name.endswith(_OF_HEADS):
                heads = _Pack(module.weight.shape[1], module.weight.shape[1], "heads")
                plan._cut(name, "weight", 1, [heads])
        for name in plan.attributes:
            of_heads = {f"{name}.{own}" for own, _ in model.get_submodule(name).named_parameters()} - plan.cuts.keys()
            plan.shared |= {one for one in of_heads if one.rpartition(".")[0] not in plan.rows}
        plan.shared |= {name for name, cut in plan.cuts.items() if cut.is_shared}
        plan._check_covered(model, blocks)
        plan._divide_vocabulary(adapter)
        return plan

    def _divide(self, model: Any, name: str, module: Any) -> None:
        """Plan for a linear layer of a block."""
        parent, _, own = name.rpartition(".")
        if own in _WHOLE:
            return
        kind = KINDS.get(f"{parent.rpartition('.')[2]}.{own}") or KINDS.get(own)
        if kind is None:
            raise _not_covered(model, f"no rule divides its layer {name!r}")
        outputs, inputs = (1, 0) if isinstance(module, Conv1D) else (0, 1)
        if kind == "row":
            self.rows.add(name)
            length = module.weight.shape[inputs]
            self._cut(name, "weight", inputs, [_Pack(length, length)])
            return
        self.columns.add(name)
        length = module.weight.shape[outputs]
        if kind in ("width", "two widths"):
            packs = [_Pack(length, length)] if kind == "width" else [_Pack(length // 2, length // 2)] * 2
        else:
            packs = self._packs(model, parent, kind, length)
        self._cut(name, "weight", outputs, packs)
        if module.bias is not None:
            self._cut(name, "bias", 0, packs)

    def _divide_experts(self, name: str, module: Any) -> None:
        """Plan for the matrices of experts."""
        self.experts.add(name)
        for own, (dim, count) in _OF_EXPERTS.items():
            length = getattr(module, own).shape[dim] // count
            self._cut(name, own, dim, [_Pack(length, length)] * count)
            if getattr(module, f"{own}_bias", None) is not None:
                raise UserError(
                    f"tensor_parallel is {self.size} and the experts {name!r} have biases, which no rule divides; "
                    "leave tensor_parallel out"
                )

    def _packs(self, model: Any, name: str, kind: Kind, length: int) -> list[_Pack]:
        """The packs of an attention's layer; notes what the attention knows of its heads."""
        attention = model.get_submodule(name)
        width = _first(attention, _HEAD_WIDTHS)
        if width is None:
            raise _not_covered(model, f"the width of a head of {name!r} is not known")
        if kind == "query":
            packs = [_Pack(length, length // width, "heads")]
        elif kind == "heads of three":
            packs = [_Pack(length, length // (3 * width), "heads")]
        elif kind == "key or value":
            packs = [_Pack(length, length // width, "key-value heads", True)]
        else:
            pairs = _first(attention, _KEY_VALUE_HEADS) or length // (3 * width)
            # Not shared: a rank's part of one matrix is counted whole, or not.
            rest = _Pack(pairs * width, pairs, "key-value heads")
            packs = [_Pack(length - 2 * rest.length, length // width - 2 * pairs, "heads"), rest, rest]
        values = self.attributes.setdefault(name, {})
        for one in packs:
            number = max(one.units // self.size, 1)
            if one.what == "heads":
                values |= {**dict.fromkeys(_HEADS, number), **dict.fromkeys(_ALL_WIDTHS, number * width)}
            else:
                values |= dict.fromkeys(_KEY_VALUE_HEADS, number)
        values[_GROUPS] = values.get(_HEADS[0], 0) // values.get(_KEY_VALUE_HEADS[0], 1)
        return packs

    def _cut(self, name: str, parameter: str, dim: int, packs: list[_Pack]) -> None:
        """Note the cut of a parameter. Raises UserError where units can be neither dealt out evenly nor shared."""
        for one in packs:
            if one.units % self.size and not (one.may_share and self.size % one.units == 0):
                raise UserError(
                    f"tensor_parallel is {self.size} and {name!r} has {one.units} {one.what}, which are dealt out "
                    f"evenly to so many ranks; use a divisor of {one.units}, or leave tensor_parallel out"
                )
        self.cuts[f"{name}.{parameter}"] = Cut.of_packs(
            dim, [one.length for one in packs], self.size, [one.units for one in packs]
        )

    def _check_covered(self, model: Any, blocks: tuple[str, ...]) -> None:
        """Raise UnsupportedModelError for other matrices in blocks, and for undivided blocks."""
        for name, parameter in model.named_parameters():
            is_whole = name.split(".")[-2] in _WHOLE or name in self.cuts
            if name.startswith(blocks) and parameter.dim() > 1 and not is_whole:
                raise _not_covered(model, f"no rule divides its weight {name!r}")
        for block in blocks:
            if not all(any(name.startswith(block) for name in names) for names in (self.columns, self.rows)):
                raise _not_covered(model, f"nothing of its block {block[:-1]!r} is divided")

    def _divide_vocabulary(self, adapter: Adapter) -> None:
        """Plan for the embeddings of tokens, and for the head, if training can make the logits in parts."""
        model, ties = adapter.reference, adapter.ties
        modules = dict(model.named_modules(remove_duplicate=False))
        weights = {name: ties.get(f"{name}.weight", f"{name}.weight") for name in modules}
        divided = {next(weights[name] for name, one in modules.items() if one is model.get_input_embeddings())}
        # Adapters may have put a copy beside the head.
        heads = {re.sub(r"\.(original_module|modules_to_save\.[^.]+)", "", name) for name in adapter.projection.names}
        if len(heads) == 1 and not adapter.is_classifier:
            self.heads = {name: weights[name] for name in heads}
            divided |= set(self.heads.values())
        elif divided & {weights[name] for name in modules if name.startswith(adapter.layers[-1].name)}:
            return  # the head reads the whole table
        for name, module in modules.items():
            if weights[name] not in divided or not hasattr(module, "weight"):
                continue
            self.cuts[weights[name]] = Cut.of_packs(0, [module.weight.shape[0]], self.size)
            if isinstance(module, nn.Embedding):
                self.tables[name] = weights[name]
            elif name not in self.heads:
                raise _not_covered(model, f"{name!r} has a part of the vocabulary and is no embedding")
        for name in self.heads:
            if (head := modules[name]).bias is not None:
                bias = f"{name}.bias"
                self.cuts[ties.get(bias, bias)] = Cut.of_packs(0, [head.out_features], self.size)
        for name, buffer in model.named_buffers():
            if self.heads and name.endswith(_OF_VOCABULARY):
                self.cuts[name] = Cut.of_packs(buffer.dim() - 1, [buffer.shape[-1]], self.size)


def _first(module: Any, names: tuple[str, ...]) -> int | None:
    """The value of the first of these attributes that a module has."""
    return next((value for name in names if isinstance(value := getattr(module, name, None), int)), None)


def _not_covered(model: Any, reason: str) -> UnsupportedModelError:
    family = model.config.model_type
    return UnsupportedModelError(
        f"tensor_parallel: the layers of the family {family!r} cannot be divided: {reason}; leave tensor_parallel out"
    )
