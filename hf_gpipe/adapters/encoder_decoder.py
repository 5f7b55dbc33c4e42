"""Encoder-decoders: the encoder's stages come first; its output is sent on with the decoder's hidden states."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Container, Mapping, Sequence

import torch

from hf_gpipe.adapters.attention.documents import Documents, is_flash
from hf_gpipe.adapters.attention.known_mask import KnownMask
from hf_gpipe.adapters.base import IGNORED_LABEL, Inputs, StageParts, Tensors
from hf_gpipe.adapters.layers import Layer, StackName
from hf_gpipe.adapters.packing import used_columns
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.adapters.text_entries import IDS, MASK, text_entries
from hf_gpipe.errors import DataError, UnsupportedModelError, UserError
from hf_gpipe.libraries.transformers import attention_implementation

#: The mask of a packed row for the decoder, which attends to the source of each document from its target.
_CROSS_MASK = "cross_attention_mask"


class EncoderDecoder(TextAdapter):
    """Marian, BART and M2M100: a stack of encoder blocks, a stack of decoder blocks with cross-attention, a head."""

    target_keys = ("labels", "decoder_input_ids", "decoder_attention_mask")
    text_keys: Mapping[StackName, tuple[str, str]] = {
        "encoder": (IDS, MASK),
        "decoder": ("decoder_input_ids", "decoder_attention_mask"),
    }

    def prepare(self, micro_batch: Tensors) -> dict[str, torch.Tensor]:
        inputs = dict(micro_batch)
        if (mask := inputs.get("attention_mask")) is not None and mask.dim() == 2:
            inputs |= self._trimmed({name: inputs[name] for name in (IDS, MASK)}, mask.bool())
        # Another mask has columns of the targets in other dimensions, and is taken as it is.
        are_plain = all(
            inputs[name].dim() == 2 for name in ("attention_mask", "decoder_attention_mask") if name in inputs
        )
        if (labels := inputs.get("labels")) is not None and are_plain:
            target = {n: t for n, t in inputs.items() if n in self.target_keys}
            inputs |= self._trimmed(target, labels != IGNORED_LABEL)
        if "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = self._shift_right(inputs["labels"])
        return inputs

    def no_targets(self, batch: Tensors, *, reads_logits: bool) -> torch.Tensor:
        if (read := batch.get("decoder_input_ids")) is not None:
            return read  # -100 would cut its columns off
        if reads_logits:
            raise DataError(
                f"a mini-batch has no 'labels', only {', '.join(batch)}; without them {self.config.model_type} needs "
                "decoder_input_ids, or predict_with_generate=True"
            )
        return torch.full((len(self.main_input(batch)), 1), IGNORED_LABEL)

    def packed(self, documents: Sequence[Tensors], *, is_compiled: bool = False) -> dict[str, torch.Tensor]:
        model = self.reference
        if is_flash(name := attention_implementation(model.config)):
            raise UserError(
                f"attn_implementation={name!r} cannot keep packed documents of a model with an encoder "
                f"({self.config.model_type}) apart; use sdpa or eager"
            )
        if "decoder_input_ids" not in documents[0]:
            documents = [
                {**document, "decoder_input_ids": self._shift_right(document["labels"][None])[0]}
                for document in documents
            ]
        row = {name: torch.cat([document[name] for document in documents])[None] for name in documents[0]}
        source, target = ([len(document[name]) for document in documents] for name in (IDS, "decoder_input_ids"))
        of_source, of_target = torch.ones_like(row[IDS]), torch.ones_like(row["decoder_input_ids"])
        masks = {
            "attention_mask": (of_source, Documents.of(source, model, is_compiled=is_compiled)),
            "decoder_attention_mask": (of_target, Documents.of(target, model, is_compiled=is_compiled)),
            _CROSS_MASK: (of_source, Documents.of(source, model, is_compiled=is_compiled, query_lengths=target)),
        }
        return row | {name: KnownMask.of(*values) for name, values in masks.items()}

    def row_lengths(self, batch: Tensors) -> torch.Tensor:
        mask, ids = batch.get("attention_mask"), batch[IDS]
        is_read = mask.bool() if mask is not None and mask.dim() == 2 else torch.ones_like(ids, dtype=torch.bool)
        return used_columns(is_read) + used_columns(batch["labels"] != IGNORED_LABEL)

    def _shift_right(self, labels: torch.Tensor) -> torch.Tensor:
        """The decoder's inputs, as the model itself would make them from the labels (B, T)."""
        model = self.reference
        shift = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
        # mBART's decoder begins with the last token of the row, its language.
        begins_with_one = shift is None or "decoder_start_token_id" in inspect.signature(shift).parameters
        if begins_with_one and getattr(self.config, "decoder_start_token_id", None) is None:
            raise UnsupportedModelError(
                f"{self.config.model_type}: the configuration has no decoder_start_token_id, with which the decoder's "
                "inputs begin; set it (T5 uses the pad_token_id)"
            )
        if hasattr(model, "prepare_decoder_input_ids_from_labels"):
            return model.prepare_decoder_input_ids_from_labels(labels)
        assert shift is not None, "the family's own function makes the decoder's inputs"
        special = (self.config.pad_token_id, self.config.decoder_start_token_id)
        return shift(labels, *special[: len(inspect.signature(shift).parameters) - 1])

    def targets(self, inputs: Tensors) -> torch.Tensor:
        return inputs["labels"]

    def carry_shapes(self, boundary: int, inputs: Inputs) -> dict[str, tuple[int, ...]]:
        carried = self._carried(boundary, inputs)
        shapes: dict[str, tuple[int, ...]] = {}
        # In generation each of the two forwards has only the ids of its own stack.
        if "hidden" in carried:
            shapes["hidden"] = self.hidden_shape(boundary, inputs[self.text_keys[self.layers[boundary].stack][0]])
        if "encoder_hidden" in carried:
            shapes["encoder_hidden"] = (*inputs[IDS].shape, self.stack_widths["encoder"])
        return shapes

    def _carried(self, boundary: int, inputs: Container[str] = ()) -> tuple[str, ...]:
        """Names of the tensors that layer `boundary` receives.

        The encoder's output is sent on as long as a later decoder block attends to it. In generation it is not sent,
        since every stage has it among its inputs.
        """
        layer = self.layers[boundary]
        attends = layer.stack == "decoder" and layer.kind in ("embedding", "block")
        hidden = () if layer.stack == "decoder" and layer.kind == "embedding" else ("hidden",)
        return (*hidden, "encoder_hidden") if attends and "encoder_outputs" not in inputs else hidden

    def sources(self, boundary: int) -> dict[str, tuple[Layer, ...]]:
        before = self.layers[:boundary]
        encoder = tuple(layer for layer in before if layer.stack == "encoder")
        # Hidden states of the decoder depend on the encoder once a block has attended to its output.
        attended = self.layers[boundary].stack == "encoder" or any(
            layer.stack == "decoder" and layer.kind == "block" for layer in before
        )
        hidden = before if attended else tuple(layer for layer in before if layer.stack == "decoder")
        sources = {"hidden": hidden, "encoder_hidden": encoder}
        return {name: sources[name] for name in self._carried(boundary)}

    def run(self, stage: StageParts, inputs: Inputs, carry: Tensors) -> dict[str, torch.Tensor]:
        """Like the base class. Generation runs encoder and decoder separately.

        Without `decoder_input_ids` only the encoder runs, with `encoder_outputs` only the decoder.
        """
        if "encoder_outputs" in inputs:
            encoder_hidden = inputs["encoder_outputs"].last_hidden_state.to(stage.device)
        elif stage.runs("encoder"):
            output = stage.model.get_encoder()(**text_entries(inputs[IDS], inputs.get(MASK)))
            if not stage.is_last and self.layers[stage.stop].stack == "encoder":
                return {"hidden": stage.captured()}
            encoder_hidden = output.last_hidden_state
        elif "encoder_hidden" in carry:
            encoder_hidden = carry["encoder_hidden"]
        else:
            # This stage has only the norm or the head: the stack's forward asks for the tensor, no layer reads it.
            shape = (*inputs[IDS].shape, self.stack_widths["encoder"])
            encoder_hidden = torch.zeros((), dtype=self.dtype, device=stage.device).expand(shape)
        if not stage.runs("decoder") or "decoder_input_ids" not in inputs:
            return {"encoder_hidden": encoder_hidden}
        skip = (IDS, _CROSS_MASK, *self.loss_keys)
        forward = {name: value for name, value in inputs.items() if name not in skip}
        if _CROSS_MASK in inputs:
            forward["attention_mask"] = inputs[_CROSS_MASK]
        forward["encoder_outputs"] = self.stacks[0].output(last_hidden_state=encoder_hidden)
        logits = stage.model(**{"use_cache": False, **forward}).logits
        if stage.is_last:
            return {"logits": logits}
        sent = {"hidden": stage.captured(), "encoder_hidden": encoder_hidden}
        return {name: sent[name] for name in self._carried(stage.stop, inputs)}
