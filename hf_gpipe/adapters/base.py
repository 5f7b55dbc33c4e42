"""From a Hugging Face model to its list of layers.

`Adapter` knows the whole model without its weights: its layers, which tensors cross each boundary, which
parameters are tied. The model of one stage is made from it (see stage_model.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters.autocast import Autocast
from hf_gpipe.adapters.batch_keys import check_keys
from hf_gpipe.adapters.document_positions import is_position_table
from hf_gpipe.adapters.known_mask import with_known_masks
from hf_gpipe.adapters.layers import Layer, StackName, stacks_of
from hf_gpipe.adapters.patches import Patch
from hf_gpipe.adapters.peft import PeftAdapter
from hf_gpipe.adapters.position_tables import shared_tables
from hf_gpipe.adapters.probe import observe_family
from hf_gpipe.adapters.quantised import Quantisation
from hf_gpipe.adapters.routers import RouterPort, find_routers
from hf_gpipe.adapters.skeleton import build_skeleton
from hf_gpipe.adapters.stubs import EmbeddingStub, PassThrough, Port
from hf_gpipe.errors import DataError

IGNORED_LABEL = -100

Tensors = Mapping[str, torch.Tensor]
#: Inputs of a model's forward: tensors in training; in generation also the cache and the other arguments of `generate`.
Inputs = Mapping[str, Any]


class Stage(Protocol):
    """What `Adapter.run` needs of a `StageModel`."""

    model: PreTrainedModel
    device: torch.device
    router_port: RouterPort
    stop: int

    @property
    def is_last(self) -> bool: ...

    def runs(self, stack: str) -> bool: ...

    def captured(self) -> torch.Tensor: ...


class Adapter(ABC):
    """The layers, boundaries and tied parameters of a model, known before any weight exists.

    Args:
        config: the model's configuration; the model is built from it on the meta device, which takes no memory.
        dtype: the type of the weights.
        attn_implementation: "eager", "sdpa" ...; None: transformers chooses.
        model_class: class of the model; None: the one that transformers' auto classes choose for the configuration.
        trust_remote_code: whether a configuration may name Python code outside of transformers.
        autocast: mixed precision of every forward; None: everything computes in the type of the weights.
        quantisation: of linear layers; the configuration then has no `quantization_config`.
    """

    #: Keys of a mini-batch that only the loss reads.
    loss_keys = ("labels", "shift_labels", "ref_logps")
    #: Keys of a mini-batch that have a value for each token of the target, where that is another text.
    target_keys: tuple[str, ...] = ()

    #: Whether the model classifies or scores rows: its logits are (B, C), those of one token of each row.
    is_classifier = False
    #: Whether a checkpoint may lack the head's weights, which are then new.
    may_lack_head = False
    #: Whether the feed-forward layers of new weights start smaller in a deeper model (feed_forward.py).
    depth_scaled_feed_forward = False
    #: Functions on modules of the model in memory that its stages run in place of the library's.
    patches: tuple[Patch, ...] = ()
    #: The PEFT adapter that alone is trained (peft_resolve.py).
    peft: PeftAdapter | None = None

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        attn_implementation: str | None = None,
        model_class: type[PreTrainedModel] | None = None,
        *,
        trust_remote_code: bool = False,
        autocast: Autocast | None = None,
        quantisation: Quantisation | None = None,
    ) -> None:
        self.given_config = config
        self.autocast = autocast
        self.quantisation = quantisation
        self.model_class = model_class
        self.dtype = dtype
        self.attn_implementation = attn_implementation
        self.trust_remote_code = trust_remote_code
        self.reference = self.skeleton()
        #: Configuration of the model itself: the text part, where the given one is of a model of images and text.
        self.config: PreTrainedConfig = self.reference.config
        #: Whether columns of padding must stay: top-k may break ties in another way without them, padding takes the
        #: places of an expert, a length must be a multiple, or the plain model's numbers were seen to depend on them.
        self.padding_matters = any(
            getattr(self.config, name, 0) for name in ("index_topk", "expert_capacity", "chunk_size_feed_forward")
        )
        observation = observe_family(config, dtype, model_class, trust_remote_code=trust_remote_code, autocast=autocast)
        self.stacks = stacks_of(self.reference, observation)
        stack_layers = [layer for stack in self.stacks for layer in stack.layers()]
        head = observation.head
        self.layers: tuple[Layer, ...] = (*stack_layers, Layer(head, "head", "decoder", (head,)))
        #: The linear layer that makes the logits, or the reason why training needs them whole.
        self.projection = observation.projection
        #: Hidden states that each layer receives, by its first module; the sizes are the tiny clone's.
        self._given = {block: stack.form.hidden for stack in self.stacks for block in stack.blocks} | observation.inputs
        blocks = [block for stack in self.stacks for block in stack.blocks]
        self.routers = find_routers(self.reference, blocks, observation)
        self._num_block_outputs = {block: stack.form.num_outputs for stack in self.stacks for block in stack.blocks}
        self._embeddings = observation.embeddings
        self._embedding_tables = observation.embedding_tables
        self._constants = observation.constants
        self._encoder_dtype = observation.encoder_dtype
        #: For each stack the modules of its first block that its other blocks also use.
        self.tables = {stack.name: shared_tables(self.reference, stack.blocks) for stack in self.stacks}

    def skeleton(self) -> PreTrainedModel:
        """Return a new copy of the whole model on the meta device: its modules and names, without memory."""
        model = build_skeleton(
            self.given_config,
            self.dtype,
            self.attn_implementation,
            self.model_class,
            trust_remote_code=self.trust_remote_code,
        )
        if self.quantisation is not None:
            self.quantisation.convert(model)
        return model

    @property
    def compared_class(self) -> type[PreTrainedModel] | None:
        """The class whose tiny clone shows whether the split is exact: of a classifier its family's language model."""
        return None if self.is_classifier else self.model_class

    @property
    def ties(self) -> dict[str, str]:
        """Name of each tied parameter -> name of the parameter that it is tied to."""
        return dict(self.reference.all_tied_weights_keys)

    def layer_of(self, parameter: str) -> int:
        """Index of the layer that a parameter or buffer belongs to.

        A parameter outside of all layers belongs to the embedding that it is tied to (an encoder-decoder's `shared`)
        or, at the root of the model, to the head that reads it (Marian's `final_logits_bias`).
        """
        module = parameter
        while "." in module:
            module = module.rpartition(".")[0]
            if (index := self._layer_of_module.get(module)) is not None:
                return index
        return 0 if "." in parameter else len(self.layers) - 1

    @cached_property
    def _layer_of_module(self) -> dict[str, int]:
        return {module: index for index, layer in enumerate(self.layers) for module in layer.all_modules}

    def prepare(self, micro_batch: Tensors) -> dict[str, torch.Tensor]:
        """Return the inputs of a micro-batch's forward, the same on every stage, from the tensors of the collator.

        Columns of padding at the end are cut off, unless the family's results could depend on them.

        """
        return self._prepared(dict(micro_batch))

    def check_keys(self, batch: Tensors) -> None:
        """Raise DataError for a key of a mini-batch that the stages cannot compute with."""
        check_keys(batch, self.reference, self.target_keys)
        if (shifted := batch.get("shift_labels")) is None:
            return
        if self.is_classifier or self.target_keys:
            raise DataError(
                f"the batch has 'shift_labels', which {type(self.reference).__name__} does not read; give labels"
            )
        if shifted.shape != (shape := batch["input_ids"].shape):
            raise DataError(f"shift_labels have the shape {tuple(shifted.shape)} and input_ids {tuple(shape)}")

    @abstractmethod
    def _prepared(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Implement `prepare` for inputs that are text."""

    def with_known_masks(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Prepared inputs on the CPU, with masks of which transformers need not ask the device whether they pad."""
        return with_known_masks(inputs)

    @abstractmethod
    def packed(self, documents: Sequence[Tensors], *, is_compiled: bool = False) -> dict[str, torch.Tensor]:
        """Return the inputs of a micro-batch's forward in which documents stand one after the other in one row.

        Args:
            documents: of each document its tensors on the CPU. Of a decoder-only model input_ids, labels and
                position_ids (T,); of an encoder-decoder input_ids (S,), labels and perhaps decoder_input_ids (T,).
            is_compiled: whether the blocks are compiled by torch.compile.

        Raises:
            UserError: the model cannot keep documents apart.
        """

    def document_lengths(self, inputs: Inputs) -> dict[StackName, tuple[int, ...]]:
        """Of a packed micro-batch the tokens of each document, for each stack; of rows nothing."""
        masks = {stack.name: inputs.get(self.mask_of(stack.name)) for stack in self.stacks}
        documents = {stack: getattr(mask, "documents", None) for stack, mask in masks.items()}
        return {stack: found.lengths for stack, found in documents.items() if found is not None}

    @abstractmethod
    def row_lengths(self, batch: Tensors) -> torch.Tensor:
        """Length of each row of a mini-batch, (N,): number of columns up to the last used one, source plus target."""

    @staticmethod
    def _used_columns(is_used: torch.Tensor) -> torch.Tensor:
        """For each row of (N, T), the number of columns up to the last used one."""
        return (is_used * torch.arange(1, is_used.shape[1] + 1, device=is_used.device)).amax(dim=1)

    def _trimmed(self, group: Mapping[str, torch.Tensor], is_used: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cut the columns at the end that no row of a micro-batch uses; `group` has the shape of `is_used` (B, T)."""
        if self.padding_matters:
            return dict(group)
        used = is_used.any(dim=0).nonzero()
        length = int(used[-1]) + 1 if len(used) else 1
        return {name: tensor[:, :length] for name, tensor in group.items()}

    def stub(self, layer: Layer, name: str, port: Port | None) -> nn.Module:
        """Return the stub that replaces module `name` of another stage's layer, which is not the head."""
        if layer.kind == "block":
            return PassThrough(port, self._num_block_outputs[name])
        if name not in self._embeddings:
            return PassThrough(port)
        module = self.reference.get_submodule(name)
        own_width = getattr(module, "embedding_dim", None) or getattr(module, "out_features", None)
        width = own_width or self.stack_width(layer.stack)
        return EmbeddingStub(width, self.dtype, is_of_positions=is_position_table(name))

    def hidden_shape(self, boundary: int, ids: torch.Tensor) -> tuple[int, ...]:
        """Shape of the hidden states that layer `boundary` receives for ids (B, T); (B, T, D) in most models."""
        return (*ids.shape, *self._given[self.layers[boundary].modules[0]].streams, self._widths[boundary])

    def carry_dtype(self, boundary: int, name: str) -> torch.dtype:
        """Type of a tensor that layer `boundary` receives.

        It is observed on the tiny clone: some models keep hidden states in float32, and under autocast their type
        differs from model to model.
        """
        if name == "hidden":
            return self._given[self.layers[boundary].modules[0]].dtype
        if name == "encoder_hidden":
            return self._encoder_dtype or self.dtype
        return next((router.dtype for router in self.routers if router.name == name), self.dtype)

    @cached_property
    def _widths(self) -> list[int]:
        """Width of the hidden states before each layer. Cached, since it is needed for every message."""
        return [self._width(layer) for layer in self.layers]

    def _width(self, layer: Layer) -> int:
        head = self.reference.get_submodule(layer.modules[0])
        if layer.kind == "head" and isinstance(
            head, nn.Linear
        ):  # OPT's `project_out` makes it narrower than the blocks
            return head.in_features
        return self.stack_width(layer.stack)

    def stack_width(self, stack: StackName) -> int:
        """Width of the hidden states between a stack's blocks."""
        return self._stack_widths[stack]

    @cached_property
    def _stack_widths(self) -> dict[StackName, int]:
        parts = {layer.stack: getattr(self.config, layer.stack, None) for layer in self.layers}
        configs = {stack: part if isinstance(part, PreTrainedConfig) else self.config for stack, part in parts.items()}
        return {stack: config.get_text_config().hidden_size for stack, config in configs.items()}

    @cached_property
    def num_positions(self) -> dict[StackName, int]:
        """For each stack with a table of positions its number of positions, the greatest length of a text."""
        found: dict[StackName, int] = {}
        for layer in self.layers:
            for name in layer.modules if layer.kind == "embedding" else ():
                for path, table in self.reference.get_submodule(name).named_modules(prefix=name):
                    if path in self._embedding_tables and is_position_table(path):
                        # In some tables the first rows are not positions.
                        first = getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1
                        found[layer.stack] = table.num_embeddings - first
        return found

    def ids_of(self, stack: StackName) -> str:
        """Name of the token ids that a stack reads."""
        return "input_ids"

    def mask_of(self, stack: StackName) -> str:
        """Name of the mask of the tokens that a stack reads."""
        return "attention_mask"

    def check_lengths(self, inputs: Inputs) -> None:
        """Raise DataError where inputs, as returned by `prepare`, are longer than the model's table of positions."""
        documents = self.document_lengths(inputs)
        for stack, most in self.num_positions.items():
            name = self.ids_of(stack)
            length = max(documents.get(stack, (inputs[name].shape[1],)))
            if length > most:
                raise DataError(
                    f"a row of {name} is {length} tokens long, and the {stack} has positions for {most}; cut the rows "
                    "(max_source_tokens and max_target_tokens of a recipe's data), or use a model with more positions"
                )

    def check_ids(self, inputs: Inputs) -> None:
        """Raise DataError where an input id or a label is not in the model's vocabulary; a GPU fails late."""
        tables = {"input_ids": self.reference.get_input_embeddings(), "labels": self.reference.get_output_embeddings()}
        tables["shift_labels"] = tables["labels"]
        for name, table in tables.items():
            if not isinstance(weight := getattr(table, "weight", None), torch.Tensor) or name not in inputs:
                continue
            ids, size = inputs[name], weight.shape[0]
            wrong = ids[((ids < 0) & (ids != IGNORED_LABEL) if name != "input_ids" else ids < 0) | (ids >= size)]
            if wrong.numel():
                raise DataError(
                    f"{name} has {int(wrong[0])}, and the model's vocabulary has {size} tokens; use the model's own "
                    "tokenizer, or resize its embeddings"
                )

    @abstractmethod
    def targets(self, inputs: Tensors) -> torch.Tensor:
        """Labels (B, T) aligned with the logits (B, T, V); positions without a target are -100."""

    @abstractmethod
    def carry_shapes(self, boundary: int, inputs: Inputs) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that layer `boundary` receives from the layer before it."""

    @abstractmethod
    def sources(self, boundary: int) -> dict[str, tuple[Layer, ...]]:
        """For each tensor that layer `boundary` receives, the layers that its value depends on."""

    def is_trained(self, layer: Layer, model: nn.Module) -> bool:
        """Whether a layer has a parameter that requires a gradient and can get one.

        Some parameters require a gradient and never get one, such as Marian's table of sines after loading, which is
        read without a graph. Inside of blocks every parameter counts, because there it may depend on the data whether
        it gets a gradient. So a stage may send a gradient that nobody needs, but never omits one.

        Args:
            layer: the layer.
            model: the model, or any stage of it that has the layer.
        """
        named = ((f"{m}.{name}", p) for m in layer.modules for name, p in model.get_submodule(m).named_parameters())
        return any(parameter.requires_grad and name not in self._constants for name, parameter in named)

    def wants_gradient(self, boundary: int, is_trained: Sequence[bool]) -> dict[str, bool]:
        """For each tensor that layer `boundary` receives, whether it depends on a layer that is trained."""
        trained = {layer for layer, is_one in zip(self.layers, is_trained, strict=True) if is_one}
        return {name: not trained.isdisjoint(layers) for name, layers in self.sources(boundary).items()}

    @abstractmethod
    def run(self, stage: Stage, inputs: Inputs, carry: Tensors) -> dict[str, torch.Tensor]:
        """Run a stage's layers and return what `StageModel.__call__` returns.

        A cache is used only where `inputs` has one, as in generation: `past_key_values` and `use_cache`.
        """
