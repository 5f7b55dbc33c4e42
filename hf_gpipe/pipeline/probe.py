"""Whether a model computes in stages, and with options, what it computes whole: a tiny clone says so before use.

`differs` runs the clone by the builder of every pipeline, and compares it with a step of the plain clone. What a
pipeline asks of it is compared once in a process for equal clones (`model/clone.py`).
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_gpipe.adapters import Adapter, Blueprint, StageModel, build_adapter, is_known_exact
from hf_gpipe.adapters.attention.document_positions import is_position_table
from hf_gpipe.adapters.modules.dropout import masks_of
from hf_gpipe.adapters.modules.kernels import check_available, kernels_of
from hf_gpipe.adapters.text import TextAdapter, check_reads_text
from hf_gpipe.adapters.text_entries import text_entries, token_ids
from hf_gpipe.errors import CheckpointError, UnsupportedModelError, UserError, one_line
from hf_gpipe.model.clone import (
    Batch,
    attention_of,
    clone_of,
    compared_once,
    exact_clone,
    packed_documents,
    padded_batch,
)
from hf_gpipe.model.opening import open_model
from hf_gpipe.model.reference import plain_step
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.pipeline.clone_steps import divided_steps, in_stages, split_step
from hf_gpipe.pipeline.exactness import verify
from hf_gpipe.pipeline.generated import verify_generation
from hf_gpipe.pipeline.variant import ModeVariant, Variant

#: The largest difference of a clone, where rows or layers are cut: parts that the library computes in float32, such as
#: the softmax of eager attention, round in another way when shapes change, and liger's kernels compute in float32
#: whatever the type of the weights. What is wrong differs by 1e-3 and more.
TOLERANCE = 1e-5
#: Where layers are divided.
DIVIDED_TOLERANCE = 1e-6
#: Of the logits of a float32 model with and without packing.
LOGITS_TOLERANCE = 1e-4


class TinyClones:
    """The probe of users' pipelines."""

    def open(self, spec: ModelSpec, device: torch.device) -> Adapter:
        return open_model(spec, device, lambda adapter: verify(adapter, Variant()))

    def require(self, adapter: Adapter, variant: Variant) -> None:
        """Raise UserError where a tiny clone computes something else when it is run so."""
        if variant.splits_backward or variant.generates:
            if isinstance(adapter, TextAdapter) and not is_known_exact(adapter):
                (verify_generation if variant.generates else verify)(adapter, variant)
            return
        adapter = check_reads_text(adapter, _setting(variant))
        if variant.kernels is not None:
            check_available(adapter.config.model_type, variant.kernels)
        if _compares_logits(variant):
            token = torch.zeros(1, dtype=torch.long)
            adapter.packed(
                [text_entries(token, labels=token)]
            )  # raises UserError of attention that sees other documents
        what = f"{variant} {attention_of(adapter)}" + f" {masks_of(adapter.config)}" * (variant.ranks > 1)
        compared_once(adapter, what, lambda: _verified(adapter, variant))
        if isinstance(variant, ModeVariant):
            variant.compared(adapter, what)


#: The probe of users' pipelines.
PROBE = TinyClones()


def _setting(variant: Variant) -> str:
    """The argument that asks for a variant, for errors."""
    if isinstance(variant, ModeVariant):
        return variant.setting
    if variant.packing:
        return "packing=True"
    return "use_liger_kernel" if variant.kernels is not None else "tensor_parallel"


def _verified(adapter: TextAdapter, variant: Variant) -> float:
    """The difference of a clone. Raises UnsupportedModelError if it is too large."""
    family, setting = adapter.given_config.model_type, _setting(variant)
    how = setting + " of packed rows" * (variant.packing and not _compares_logits(variant))
    how += " and recompute: block" * (variant.recompute == "block")
    try:
        difference = differs(adapter, variant)
    except CheckpointError:
        difference = float("inf")  # of a weight that ranks have alike
    except Exception as error:
        if variant.ranks > 1 and isinstance(error.__cause__, UserError):
            raise type(error.__cause__)(f"{setting}: {error.__cause__}, or leave {setting} out") from None
        reason = one_line(str(error), 300)
        raise UnsupportedModelError(f"{family}: {how} fails on a tiny clone: {reason}; leave {setting} out") from error
    if difference <= tolerance(variant):
        return difference
    why = ""
    if isinstance(variant, ModeVariant):
        why = f": {variant.cause}"
    elif variant.packing:
        why = ": documents in one row change each other's logits; use a collator that pads"
    what = "logits" if _compares_logits(variant) else "gradients"
    raise UnsupportedModelError(
        f"{family}: with {how} a tiny clone has other {what}, by {difference:.0e} of their norm{why}; "
        f"leave {setting} out"
    )


def tolerance(variant: Variant) -> float:
    """The largest difference that rounding explains."""
    if variant.ranks > 1:
        return DIVIDED_TOLERANCE
    return LOGITS_TOLERANCE if _compares_logits(variant) else TOLERANCE


def _compares_logits(variant: Variant) -> bool:
    return variant.packing and not isinstance(variant, ModeVariant)


def differs(adapter: TextAdapter, variant: Variant) -> float:
    """How far a step of a tiny clone that is run so is from that of the plain clone, of the norm of the gradient.

    Args:
        adapter: the model's.
        variant: how its clone is run. Of packed rows logits are compared; and of divided layers the step with whole
            layers, whose dropout is that of the model.
    """
    if variant.ranks > 1:
        return _divided_differ(adapter, variant)
    if variant.kernels is not None:
        return _kernels_differ(adapter, variant)
    if isinstance(variant, ModeVariant):
        return variant.differs(adapter)
    return _packed_differ(adapter)


def _kernels_differ(adapter: TextAdapter, variant: Variant) -> float:
    matmul = torch.backends.cuda.matmul
    precision, matmul.fp32_precision = matmul.fp32_precision, "ieee"  # a user may have turned TF32 on
    try:
        model, clone = clone_of(adapter, torch.float32)
        batch = padded_batch(model)
        if not kernels_of(clone.reference):
            raise UnsupportedModelError("no kernel of liger-kernel fits the model")
        expected = plain_step(model, batch, clone)
        return split_step(model, clone, batch, variant).difference(expected)
    finally:
        matmul.fp32_precision = precision


def _divided_differ(adapter: TextAdapter, variant: Variant) -> float:
    """The clone has the model's probabilities of dropout, so that masks are compared too."""
    given, dtype = adapter.blueprint, torch.float64
    model = exact_clone(given.config, dtype, adapter.compared_class, trust_remote_code=given.trust_remote_code)
    model.set_attn_implementation(attention_of(adapter))
    for path, probability in masks_of(adapter.config).items():
        *configs, name = path.split(".")
        setattr(reduce(getattr, configs, model.config), name, probability)
    clone = build_adapter(Blueprint(model.config, dtype, attention_of(adapter), type(model)))
    batch = padded_batch(model)
    (expected,) = divided_steps(model, clone, batch, Variant())
    return max(step.difference(expected) for step in divided_steps(model, clone, batch, variant))


def _packed_differ(adapter: TextAdapter) -> float:
    """How far the logits of documents in one row are from those that the plain clone has of each document alone.

    Models with a state beside attention, such as recurrent layers, carry it from one document into the next.
    """
    model, clone = clone_of(adapter, torch.float32)
    model.eval()
    stage = in_stages(model, clone, Variant(1)).parameters.models[0]
    stage.model.eval()
    documents = packed_documents(model, clone)
    with torch.no_grad():
        packed = stage(clone.packed(documents), {})["logits"]
        # Without position ids: where a model's own do not begin at 0, those of packed rows are not the rows' own.
        rows = [text_entries(token_ids(own)[None], labels=own["labels"][None]) for own in documents]
        alone = [_plain_logits(model, clone.prepare(row)) for row in rows]
    if _depends_on_others(stage, clone.packed(documents), documents):
        return float("inf")
    expected = torch.cat(alone, dim=1)
    return float((packed - expected).norm() / expected.norm())


def _plain_logits(model: PreTrainedModel, row: Batch) -> torch.Tensor:
    logits: torch.Tensor = model(**{name: own for name, own in row.items() if name != "labels"}, use_cache=False).logits
    return logits


def _depends_on_others(stage: StageModel, packed: Batch, documents: list[Batch]) -> bool:
    """Whether the logits of the last document have any gradient at the embeddings of another one.

    However small the values are by which documents change each other, as under a norm with a large epsilon, this
    gradient is 0 only where nothing connects them.
    """
    embedded: list[torch.Tensor] = []

    def as_leaf(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models change it in place

    size = stage.model.get_input_embeddings().weight.shape[0]
    tables = [
        module
        for name, module in stage.model.named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == size and not is_position_table(name)
    ]
    handles = [table.register_forward_hook(as_leaf) for table in tables]
    try:
        logits = stage(packed, {})["logits"]
    finally:
        for handle in handles:
            handle.remove()
    last = [len(values) for values in (token_ids(documents[-1]), documents[-1]["labels"])]
    logits[:, -last[1] :].square().sum().backward()
    return any(tensor.grad is not None and bool(tensor.grad[:, : -max(last)].any()) for tensor in embedded)
