"""Which layers of a model are divided among the ranks of a worker, and how: by the names that families give them.

Another family is an entry of the tables below. A tiny clone then says whether its division is exact
(`probe.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from hf_gpipe.adapters.base import Adapter
from hf_gpipe.adapters.parts.cuts import Cut, Heads, Runs, dealt, lengths, scaled
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.libraries.transformers import Conv1D

Kind = Literal["query", "key or value", "query, key and value", "heads of three", "width", "two widths", "row"]


def _names(kind: Kind, *names: str) -> dict[str, Kind]:
    return dict.fromkeys(names, kind)


#: The linear layers of blocks by the last part of their names, or the last two. A column layer has a part of the
#: outputs, in whole heads or not. A row layer, which reads what column layers have made, has a part of the inputs.
KINDS: Mapping[str, Kind] = {
    **_names("query", "q_proj", "q", "query"),
    **_names("key or value", "k_proj", "v_proj", "k", "v", "key", "value"),
    # One matrix has q, k and v one after the other: of all heads, or head by head.
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


#: A linear layer of blocks has a part of its outputs (column) or of its inputs (row), each expert a part of its width,
#: an embedding of tokens (table), and the linear layer that makes logits (head), a part of the vocabulary.
Part = Literal["column", "row", "experts", "table", "head"]


@dataclass
class SplitPlan:
    """The divided layers of a model, by their names in it.

    Attributes:
        size: T, the ranks of a worker.
        cuts: the cut of each divided parameter or buffer, under its own name, and never under an alias.
        modules: how each divided module is divided.
        weights: the names of the weights of tables and heads, by module.
        units: the number of heads or columns that each rank makes for the row layer after it, by column layer.
        heads_of: the heads of each rank, by attention.
        shared: parameters that several ranks have alike and use for their own heads: their gradients are summed.
    """

    size: int
    cuts: dict[str, Cut] = field(default_factory=dict)
    modules: dict[str, Part] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    units: dict[str, tuple[int, ...]] = field(default_factory=dict)
    heads_of: dict[str, Heads] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, adapter: Adapter, size: int) -> SplitPlan:
        """The plan for T ranks.

        Raises:
            UnsupportedModelError: the blocks have a layer of which no table says how it is divided.
            UserError: the model has fewer heads or columns than ranks.
        """
        plan, model = cls(size), adapter.reference
        blocks = tuple(f"{block}." for stack in adapter.stacks for block in stack.blocks)
        inside = [(name, module) for name, module in model.named_modules() if name.startswith(blocks)]
        linear = [(name, module) for name, module in inside if isinstance(module, nn.Linear | Conv1D)]
        made = plan._divide_columns(model, linear)
        plan._divide_rows(model, linear, made)
        for name, module in inside:
            if all(isinstance(getattr(module, own, None), nn.Parameter) for own in _OF_EXPERTS):
                plan._divide_experts(name, module)
            elif name.endswith(_OF_HEADS):
                heads = plan._heads(model, name.rpartition(".")[0])
                plan.cuts[f"{name}.weight"] = Cut.from_packs(1, [heads.queries])
        for name in plan.heads_of:
            of_heads = {f"{name}.{own}" for own, _ in model.get_submodule(name).named_parameters()} - plan.cuts.keys()
            plan.shared |= {path for path in of_heads if plan.modules.get(path.rpartition(".")[0]) != "row"}
        plan.shared |= {name for name, cut in plan.cuts.items() if cut.is_shared}
        plan._check_covered(model, blocks)
        plan._divide_vocabulary(adapter)
        return plan

    @property
    def is_even(self) -> bool:
        """Whether each rank has as many heads and columns of blocks as any other."""
        return all(len(set(units)) == 1 for units in self.units.values())

    def _divide_columns(self, model: Any, layers: Sequence[tuple[str, Any]]) -> dict[str, Runs]:
        """Plan for the column layers among the linear layers of blocks.

        Returns:
            The units, heads or columns, that the column layers make and a row layer then reads, by parent module.
        """
        made: dict[str, Runs] = {}
        for name, layer in layers:
            kind, parent = _kind(model, name), name.rpartition(".")[0]
            if kind in (None, "row"):
                continue
            dim = 1 if isinstance(layer, Conv1D) else 0
            length = layer.weight.shape[dim]
            if kind in ("width", "two widths"):
                count = length if kind == "width" else length // 2
                packs = [self._dealt(name, count)] * (length // count)
                made[parent] = packs[0]
            else:
                packs = self._packs(model, parent, kind, length)
                made[parent] = self.heads_of[parent].queries
            self.modules[name] = "column"
            if kind != "key or value":
                self.units[name] = lengths(made[parent])
            self.cuts[f"{name}.weight"] = Cut.from_packs(dim, packs)
            if layer.bias is not None:
                self.cuts[f"{name}.bias"] = Cut.from_packs(0, packs)
        return made

    def _divide_rows(self, model: Any, layers: Sequence[tuple[str, Any]], made: Mapping[str, Runs]) -> None:
        """Plan for the row layers: it reads what column layers beside it make, or, as in BERT, before it."""
        before = ""
        for name, layer in layers:
            parent = name.rpartition(".")[0]
            if self.modules.get(name) == "column":
                before = parent
            if _kind(model, name) != "row":
                continue
            read, dim = made.get(parent, made.get(before)), 0 if isinstance(layer, Conv1D) else 1
            length = layer.weight.shape[dim]
            if read is None or length % read[-1][1]:
                raise _not_covered(model, f"what its layer {name!r} reads is not known")
            self.modules[name] = "row"
            self.cuts[f"{name}.weight"] = Cut.from_packs(dim, [scaled(read, length // read[-1][1])])

    def _divide_experts(self, name: str, module: Any) -> None:
        """Plan for the matrices of experts."""
        self.modules[name] = "experts"
        for own, (dim, count) in _OF_EXPERTS.items():
            length = getattr(module, own).shape[dim] // count
            self.cuts[f"{name}.{own}"] = Cut.from_packs(dim, [self._dealt(name, length)] * count)
            if getattr(module, f"{own}_bias", None) is not None:
                raise UserError(f"the experts {name!r} have biases, which no rule divides; use experts without them")

    def _packs(self, model: Any, name: str, kind: Kind, length: int) -> list[Runs]:
        """The packs of a layer of an attention."""
        heads = self._heads(model, name)
        num_queries, num_pairs = heads.queries[-1][1], heads.pairs[-1][1]
        if kind == "query, key and value":
            width = length // (num_queries + 2 * num_pairs)
            return [scaled(cuts, width) for cuts in (heads.queries, heads.pairs, heads.pairs)]
        if kind == "key or value":
            return [scaled(heads.pairs, length // num_pairs)]
        return [scaled(heads.queries, length // num_queries)]

    def _heads(self, model: Any, name: str) -> Heads:
        """The heads of an attention; notes what it knows of them."""
        if name in self.heads_of:
            return self.heads_of[name]
        attention = model.get_submodule(name)
        width = _first(attention, _HEAD_WIDTHS)
        if width is None:
            raise _not_covered(model, f"the width of a head of {name!r} is not known")
        counts: dict[Kind, int] = {}
        for own, layer in attention.named_children():
            if isinstance(layer, nn.Linear | Conv1D) and (kind := KINDS.get(own)):
                counts[kind] = layer.weight.shape[1 if isinstance(layer, Conv1D) else 0] // width
        packed = "query, key and value"
        if packed in counts:
            num_pairs = _first(attention, _KEY_VALUE_HEADS) or counts[packed] // 3
            num_queries = counts[packed] - 2 * num_pairs
        else:
            num_queries = counts.get("query", counts.get("heads of three", 0) // 3)
            num_pairs = counts.get("key or value", num_queries)
        if not num_pairs or num_queries % num_pairs:
            raise _not_covered(model, f"{name!r} has {num_queries} heads and {num_pairs} of keys and values")
        if num_queries < self.size:
            raise self._too_few(name, num_queries, "heads")
        self.heads_of[name] = Heads.of(num_queries, num_pairs, self.size, width)
        return self.heads_of[name]

    def attributes(self, attention: str, place: int) -> dict[str, int]:
        """The numbers of a rank's heads by the names of attributes, of which an attention has some."""
        heads = self.heads_of[attention]
        own, pairs = (lengths(runs)[place] for runs in (heads.queries, heads.pairs))
        return {
            **dict.fromkeys(_HEADS, own),
            **dict.fromkeys(_ALL_WIDTHS, own * heads.width),
            **dict.fromkeys(_KEY_VALUE_HEADS, pairs),
            _GROUPS: own // pairs,
        }

    def _dealt(self, name: str, count: int) -> Runs:
        if count < self.size:
            raise self._too_few(name, count, "columns")
        return dealt(count, self.size)

    def _too_few(self, name: str, count: int, what: str) -> UserError:
        return UserError(f"{name!r} has {count} {what}, and each rank needs one; use at most {count}")

    def _check_covered(self, model: Any, blocks: tuple[str, ...]) -> None:
        """Raise UnsupportedModelError for other matrices in blocks, and for undivided blocks."""
        for name, parameter in model.named_parameters():
            is_whole = name.split(".")[-2] in _WHOLE or name in self.cuts
            if name.startswith(blocks) and parameter.dim() > 1 and not is_whole:
                raise _not_covered(model, f"no rule divides its weight {name!r}")
        for block in blocks:
            if not {"column", "row"} <= {part for name, part in self.modules.items() if name.startswith(block)}:
                raise _not_covered(model, f"nothing of its block {block[:-1]!r} is divided")

    def _divide_vocabulary(self, adapter: Adapter) -> None:
        """Plan for the embeddings of tokens, and for the head, if training can make the logits in parts."""
        model, ties = adapter.reference, adapter.ties
        modules = dict(model.named_modules(remove_duplicate=False))
        weights = {name: ties.get(f"{name}.weight", f"{name}.weight") for name in modules}
        divided = {
            next(weights[name] for name, candidate in modules.items() if candidate is model.get_input_embeddings())
        }
        # Adapters may have put a copy beside the head.
        heads = {re.sub(r"\.(original_module|modules_to_save\.[^.]+)", "", name) for name in adapter.projection.names}
        if len(heads) != 1 or adapter.is_classifier:
            heads = set()
            if divided & {weights[name] for name in modules if name.startswith(adapter.layers[-1].name)}:
                return  # the head reads the whole table
        divided |= {weights[name] for name in heads}
        for name, module in modules.items():
            if weights[name] not in divided or not hasattr(module, "weight"):
                continue
            self.cuts[weights[name]] = Cut.from_packs(0, [dealt(len(module.weight), self.size)])
            is_table = isinstance(module, nn.Embedding)
            if not is_table and name not in heads:
                raise _not_covered(model, f"{name!r} has a part of the vocabulary and is no embedding")
            self.modules[name] = "table" if is_table else "head"
            self.weights[name] = weights[name]
        for name in heads:
            if (head := modules[name]).bias is not None:
                bias = f"{name}.bias"
                self.cuts[ties.get(bias, bias)] = Cut.from_packs(0, [dealt(head.out_features, self.size)])
        for name, buffer in model.named_buffers():
            if heads and name.endswith(_OF_VOCABULARY):
                self.cuts[name] = Cut.from_packs(buffer.dim() - 1, [dealt(buffer.shape[-1], self.size)])


def _kind(model: Any, name: str) -> Kind | None:
    """How a linear layer of a block is divided; None: it stays whole."""
    parent, _, own = name.rpartition(".")
    if own in _WHOLE:
        return None
    kind = KINDS.get(f"{parent.rpartition('.')[2]}.{own}") or KINDS.get(own)
    if kind is None:
        raise _not_covered(model, f"no rule divides its layer {name!r}")
    return kind


def _first(module: Any, names: tuple[str, ...]) -> int | None:
    """The value of the first of these attributes that a module has."""
    return next((value for name in names if isinstance(value := getattr(module, name, None), int)), None)


def _not_covered(model: Any, reason: str) -> UnsupportedModelError:
    family = model.config.model_type
    return UnsupportedModelError(f"the layers of the family {family!r} cannot be divided: {reason}; use another family")
