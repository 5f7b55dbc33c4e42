"""`PipelineSFTConfig`: the arguments of supervised fine-tuning, by TRL's names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hf_gpipe.data.examples.packed_rows import STRATEGIES
from hf_gpipe.errors import UserError, check_choice
from hf_gpipe.losses.loss import TokenLoss
from hf_gpipe.losses.token_metrics import TokenMetrics
from hf_gpipe.trainers.model_arguments import ModelArguments
from hf_gpipe.training.arguments import argument

_NOT_PREPARED = "dataset_kwargs has skip_prepare_dataset=True, so the collator gets the rows as they are"


@dataclass
class PipelineSFTConfig(ModelArguments):
    """Arguments of `PipelineSFTTrainer`: those of `PipelineTrainer`, and TRL's SFTConfig's by their names.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*ModelArguments._VALID_DICT_FIELDS, "dataset_kwargs"]

    learning_rate: float = argument(2e-5, "Peak learning rate.")
    router_aux_loss_coef: float | None = argument(
        None, "Weight of the auxiliary loss of a mixture of experts; 0: no such loss; None: as in its configuration."
    )
    chat_template_path: str | None = argument(None, "File with the chat template; its name ends in .jinja or .j2.")
    dataset_text_field: str = argument("text", "The column of texts.")
    dataset_kwargs: dict[str, Any] | str | None = argument(
        None, "`skip_prepare_dataset: True`: the data_collator gets the rows as they are."
    )
    dataset_num_proc: int | None = argument(None, "Has no effect: the main process tokenises and packs the rows.")
    eos_token: str | None = argument(None, "The token that ends a text; None: the tokenizer's.")
    pad_token: str | None = argument(
        None, "The token that fills rows; None: the tokenizer's, or its end-of-sequence token."
    )
    max_length: int | None = argument(
        1024, "Maximum number of tokens of a row or, with packing, of a packed row; None: rows are not cut."
    )
    truncation_mode: str = argument("keep_start", "The end of a row that is kept: keep_start or keep_end.")
    shuffle_dataset: bool = argument(False, "Whether the rows are shuffled once, before the training.")
    packing: bool = argument(
        False,
        "Whether rows are packed into rows of up to max_length tokens; a packed row counts as one row of the batch.",
    )
    packing_strategy: str = argument("bfd", "bfd, bfd_split or wrapped.")
    eval_packing: bool | None = argument(None, "Whether rows are packed for evaluation; None: as `packing` says.")
    padding_free: bool = argument(False, "Whether micro-batches have no padding; it needs max_length=None or packing.")
    pad_to_multiple_of: int | str | None = argument(
        "auto", "None or auto: a micro-batch is as wide as its longest row; other values are not supported."
    )
    completion_only_loss: bool | None = argument(
        None, "Whether only completions are learnt, and not prompts; None: where rows have a prompt and a completion."
    )
    assistant_only_loss: bool = argument(
        False, "Whether only the assistant's turns are learnt; rows then need messages."
    )
    loss_type: str = argument("nll", "nll, or dft (Dynamic Fine-Tuning).")
    activation_offloading: bool = argument(False, "Not supported: set recompute='host'.")

    def check(self) -> None:
        super().check()
        if self.loss_type == "chunked_nll":  # TRL's older name
            self.loss_type = "nll"
        check_choice("loss_type", self.loss_type, ("nll", "dft"))
        check_choice("truncation_mode", self.truncation_mode, ("keep_start", "keep_end"))
        check_choice("packing_strategy", self.packing_strategy, STRATEGIES)
        if self.activation_offloading:
            raise UserError("activation_offloading=True is not supported; set recompute='host', for each stage or all")
        if self.pad_to_multiple_of not in (None, "auto"):
            raise UserError(
                f"pad_to_multiple_of={self.pad_to_multiple_of!r} is not supported: each micro-batch is as wide as its "
                "longest row; leave it out"
            )
        if self.chat_template_path is not None and not self.chat_template_path.endswith((".jinja", ".j2")):
            raise UserError(
                f"chat_template_path={self.chat_template_path!r}: the template of another tokenizer may need new "
                "tokens; give a file that ends in .jinja or .j2, or add the tokens, resize the model and set "
                "tokenizer.chat_template before"
            )
        options = self.dataset_kwargs if isinstance(self.dataset_kwargs, dict) else {}
        if unknown := options.keys() - {"skip_prepare_dataset"}:
            raise UserError(f"dataset_kwargs: {min(unknown)!r} is not supported; only skip_prepare_dataset is")
        if (self.packing or self.eval_packing) and self.max_length is None:
            raise UserError("packing needs max_length, the tokens of a packed row")
        packs = self.packing or bool(self.eval_packing)
        for name, is_read, reason in (
            ("packing_strategy", packs, "no rows are packed"),
            ("truncation_mode", self.max_length is not None and not self.packing, "no rows are cut one by one"),
            ("assistant_only_loss", not self.skips_preparation, _NOT_PREPARED),
            ("completion_only_loss", not self.skips_preparation, _NOT_PREPARED),
            ("shuffle_dataset", not self.skips_preparation, _NOT_PREPARED),
        ):
            if not is_read and (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                raise UserError(f"{name}={value!r} would have no effect: {reason}; leave it out")
        if self.padding_free and not self.packing and self.max_length is not None:
            raise UserError(
                "padding_free=True without packing goes with max_length=None, as in TRL; cut the rows yourself, or use "
                "packing=True"
            )

    @property
    def packs_rows(self) -> bool:
        """Whether micro-batches are rows of documents without padding."""
        return self.padding_free or (self.packing and self.packing_strategy != "wrapped")

    @property
    def skips_preparation(self) -> bool:
        """Whether the collator gets the rows as they are."""
        return isinstance(self.dataset_kwargs, dict) and bool(self.dataset_kwargs.get("skip_prepare_dataset"))

    @property
    def of_tokens(self) -> TokenLoss:
        return replace(super().of_tokens, is_dynamic=self.loss_type == "dft")

    def make_loss(self) -> TokenLoss:
        """The loss that these arguments ask for, which notes its metrics."""
        return replace(self.of_tokens, metrics=TokenMetrics())
