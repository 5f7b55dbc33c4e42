"""The teacher of a distillation: another model with the same vocabulary, which its student has beside it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedConfig

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.decoder_only import DecoderOnly
from hf_gpipe.errors import UserError
from hf_gpipe.losses.loss import Loss, Reads
from hf_gpipe.model.spec import ModelSpec


def open_model(spec: ModelSpec, student: Adapter, open_one: Callable[[ModelSpec], Adapter]) -> Adapter:
    """The adapter of a teacher. The student's then keeps the columns of padding on which the teacher depends, too.

    Args:
        spec: of the teacher.
        student: the model that is trained.
        open_one: reads and checks a model that reads text.

    Raises:
        UserError: the two models do not fit.
    """
    if spec.peft_config is not None:
        raise UserError("teacher: it has PEFT adapters; merge them into the model first, by hf-gpipe merge")
    if isinstance(spec.model, PreTrainedConfig):
        raise UserError("teacher: a configuration has no weights; give a model, or the path of one")
    adapter = open_one(spec)
    for name, model in (("teacher", adapter), ("model", student)):
        what = f"{name}: {type(model.reference).__name__}"
        if type(model) is not DecoderOnly:
            raise UserError(f"{what} cannot be distilled; both models must be decoder-only language models")
        if not model.projection.names:
            raise UserError(f"{what} makes its logits whole ({model.projection.reason}), and distillation in parts")
        if model.padding_matters_beyond == 0:
            raise UserError(f"{what} depends on the padding of rows, which two models would have to share")
    # Both read the same rows, which keep the columns of padding on which either depends.
    limits = [limit for one in (adapter, student) if (limit := one.padding_matters_beyond) is not None]
    student.padding_matters_beyond = min(limits, default=None)
    sizes = [model.reference.get_output_embeddings().weight.shape[0] for model in (adapter, student)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"teacher: it gives {sizes[0]} logits for a token, and the model {sizes[1]}; both must have the same "
            "vocabulary, so choose a teacher of the model's family"
        )
    return adapter


def check(teacher: ModelSpec | None, student: ModelSpec, loss: Loss) -> None:
    """Raise UserError unless there is a teacher exactly where the loss reads its logits, with weights of its own."""
    name, is_read = type(loss).__name__, Reads.COMPANION in loss.reads
    if teacher is None and is_read:
        raise UserError(f"loss is a {name}, and there is no teacher; give teacher, a model or the path of one")
    if teacher is not None and not is_read:
        raise UserError(f"teacher is given, and the loss, a {name}, does not read it; give loss=DistillationLoss()")
    if teacher is not None and isinstance(teacher.model, nn.Module) and isinstance(student.model, nn.Module):
        trained = {id(parameter) for parameter in student.model.parameters()}
        shared = [own for own, parameter in teacher.model.named_parameters() if id(parameter) in trained]
        if shared:
            raise UserError(
                f"teacher: it shares {len(shared)} weights with the model, such as {shared[0]}, and would be trained "
                "with it; give a copy (copy.deepcopy), or the path of a model"
            )
