"""From a Hugging Face model to its list of layers, and from a run of layers to a stage's model.

`Adapter` knows the whole model without its weights: its layers, what crosses each boundary, which parameters are
tied. `StageModel` is the same Hugging Face model with only its own layers in it (see stubs.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters.autocast import Autocast, scope_of
from hf_gpipe.adapters.dropout import DropoutSeeds, default_generator, key
from hf_gpipe.adapters.layers import Layer, StackName, stacks_of
from hf_gpipe.adapters.position_tables import hollow, lend_tables, shared_tables
from hf_gpipe.adapters.probe import observe_family
from hf_gpipe.adapters.routers import RouterPort, complete, find_routers
from hf_gpipe.adapters.skeleton import build_skeleton
from hf_gpipe.adapters.stubs import EmbeddingStub, HeadStub, PassThrough, Port, admit, resemble
from hf_gpipe.errors import DataError

IGNORED_LABEL = -100

#: Beginnings of the names of a batch's tensors that would take the place of ids, or stand beside them.
_NOT_TEXT = ("inputs_embeds", "decoder_inputs_embeds", "pixel_values", "image_", "video_", "input_features", "audio_")

Tensors = Mapping[str, torch.Tensor]
#: What a model's forward is given: tensors in training; in generation also the cache and what else `generate` passes.
Inputs = Mapping[str, Any]


class Adapter(ABC):
    """What is known of a model before any weight exists.

    Args:
        config: the model's configuration; the model is built from it on the meta device, without memory.
        dtype: the type of the weights.
        attn_implementation: "eager", "sdpa" ...; None leaves the choice to transformers.
        model_class: class of the model; None: the one that transformers' auto classes choose for the configuration.
        trust_remote_code: whether a configuration may name Python code outside of transformers.
        autocast: mixed precision of every forward; None: all computes in the type of the weights.
    """

    #: Keys of a mini-batch that only the loss reads.
    loss_keys = ("labels",)

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        attn_implementation: str | None = None,
        model_class: type[PreTrainedModel] | None = None,
        *,
        trust_remote_code: bool = False,
        autocast: Autocast | None = None,
    ) -> None:
        self.given_config = config
        self.autocast = autocast
        self.model_class = model_class
        self.dtype = dtype
        self.attn_implementation = attn_implementation
        self.trust_remote_code = trust_remote_code
        self.reference = self.skeleton()
        #: Of the model itself: the text part, where the configuration is of a model of images and text.
        self.config: PreTrainedConfig = self.reference.config
        # A choice of the top k breaks ties by what else is in memory.
        self._padding_matters = hasattr(self.config, "index_topk")
        observation = observe_family(config, dtype, model_class, trust_remote_code=trust_remote_code, autocast=autocast)
        self.stacks = stacks_of(self.reference, observation)
        stack_layers = [layer for stack in self.stacks for layer in stack.layers()]
        head = observation.head
        self.layers: tuple[Layer, ...] = (*stack_layers, Layer(head, "head", "decoder", (head,)))
        #: What each layer receives, by its first module; sizes are the tiny clone's.
        self._given = {block: stack.form.hidden for stack in self.stacks for block in stack.blocks} | observation.inputs
        blocks = [block for stack in self.stacks for block in stack.blocks]
        self.routers = find_routers(self.reference, blocks, observation)
        self._num_block_outputs = {block: stack.form.num_outputs for stack in self.stacks for block in stack.blocks}
        self._embeddings = observation.embeddings
        self._constants = observation.constants
        self._encoder_dtype = observation.encoder_dtype
        #: For each stack the modules of its first block that its other blocks use too.
        self.tables = {stack.name: shared_tables(self.reference, stack.blocks) for stack in self.stacks}

    def skeleton(self) -> PreTrainedModel:
        """A fresh copy of the whole model on the meta device: its modules and names, no memory."""
        return build_skeleton(
            self.given_config,
            self.dtype,
            self.attn_implementation,
            self.model_class,
            trust_remote_code=self.trust_remote_code,
        )

    @property
    def ties(self) -> dict[str, str]:
        """Tied parameter name -> name of the parameter it is tied to, as the configuration asks."""
        return dict(self.reference.all_tied_weights_keys)

    def layer_of(self, parameter: str) -> int:
        """Index of the layer that a parameter or buffer belongs to.

        What lies outside of every layer goes with the embedding that it is tied to (an encoder-decoder's `shared`)
        or, at the root of the model, with the head that reads it (Marian's `final_logits_bias`).
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
        """The inputs of a micro-batch's forward on any stage, from what the collator gave.

        Columns at the end that only pad are cut off, unless the family's results could depend on them.

        Raises DataError for inputs that are not text.
        """
        if foreign := [name for name in micro_batch if name.startswith(_NOT_TEXT)]:
            raise DataError(f"the batch has {foreign[0]!r}; a pipeline takes token ids only")
        return self._prepared(dict(micro_batch))

    @abstractmethod
    def _prepared(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`prepare` for text."""

    @abstractmethod
    def row_lengths(self, batch: Tensors) -> torch.Tensor:
        """How long each row of a mini-batch is, (N,): its columns up to the last one used, sources and targets."""

    @staticmethod
    def _used_columns(is_used: torch.Tensor) -> torch.Tensor:
        """For each row of (N, T), the number of columns up to the last used one."""
        return (is_used * torch.arange(1, is_used.shape[1] + 1, device=is_used.device)).amax(dim=1)

    def _trimmed(self, group: Mapping[str, torch.Tensor], is_used: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cut the columns at the end that no row of a micro-batch uses; `group` has the shape of `is_used` (B, T)."""
        if self._padding_matters:
            return dict(group)
        used = is_used.any(dim=0).nonzero()
        length = int(used[-1]) + 1 if len(used) else 1
        return {name: tensor[:, :length] for name, tensor in group.items()}

    def stub(self, layer: Layer, name: str, port: Port | None) -> nn.Module:
        """What stands for module `name` of a layer that is neither the head nor on the stage."""
        if layer.kind == "block":
            return PassThrough(port, self._num_block_outputs[name])
        if name not in self._embeddings:
            return PassThrough(port)
        module = self.reference.get_submodule(name)
        own_width = getattr(module, "embedding_dim", None) or getattr(module, "out_features", None)
        return EmbeddingStub(own_width or self.stack_width(layer.stack), self.dtype)

    def hidden_shape(self, boundary: int, ids: torch.Tensor) -> tuple[int, ...]:
        """Shape of the hidden states that layer `boundary` receives for ids (B, T): (B, T, D) in most models."""
        return (*ids.shape, *self._given[self.layers[boundary].modules[0]].streams, self._widths[boundary])

    def carry_dtype(self, boundary: int, name: str) -> torch.dtype:
        """Type of a tensor that layer `boundary` receives.

        It is what was observed on the tiny clone: some models keep hidden states in float32, and under autocast they
        have one type in one model and another in the next.
        """
        if name == "hidden":
            return self._given[self.layers[boundary].modules[0]].dtype
        if name == "encoder_hidden":
            return self._encoder_dtype or self.dtype
        return next((router.dtype for router in self.routers if router.name == name), self.dtype)

    @cached_property
    def _widths(self) -> list[int]:
        """Of the hidden states before each layer: looked up once, for every message asks."""
        return [self._width(layer) for layer in self.layers]

    def _width(self, layer: Layer) -> int:
        head = self.reference.get_submodule(layer.modules[0])
        if layer.kind == "head" and isinstance(head, nn.Linear):  # narrower than the blocks after OPT's `project_out`
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
        """Rows of a stack's table of positions, where it has one: no text can be longer."""
        found: dict[StackName, int] = {}
        for layer in self.layers:
            for name in layer.all_modules if layer.kind == "embedding" else ():
                table, own = self.reference.get_submodule(name), name.rpartition(".")[2]
                if isinstance(table, nn.Embedding) and ("position" in own or own == "wpe"):
                    # The first rows of some tables stand for no position.
                    found[layer.stack] = table.num_embeddings - getattr(table, "offset", 0)
        return found

    def ids_of(self, stack: StackName) -> str:
        """Name of the inputs that a stack reads."""
        return "input_ids"

    def check_lengths(self, inputs: Inputs) -> None:
        """Raise DataError where what `prepare` made is longer than the model has positions for."""
        for stack, most in self.num_positions.items():
            name = self.ids_of(stack)
            if (length := inputs[name].shape[1]) > most:
                raise DataError(
                    f"a row of {name} is {length} tokens long, and the {stack} has positions for {most}; cut the rows "
                    "(max_source_tokens and max_target_tokens of a recipe's data), or use a model with more positions"
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
        """Whether a gradient can reach a parameter of a layer that requires one.

        A table of sines may require one and be read without a graph, as Marian's is once it was loaded. Inside of
        blocks every parameter counts, for what a gradient reaches there may depend on the data: too many gradients are
        then sent, never too few.

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
    def run(self, stage: StageModel, inputs: Inputs, carry: Tensors) -> dict[str, torch.Tensor]:
        """Run a stage's layers: the carry of the next boundary, or on the last stage what `StageModel` returns there.

        No cache is kept unless `inputs` brings one, as in generation: `past_key_values` and `use_cache`.
        """


class StageModel:
    """The Hugging Face model with the layers `start` to `stop` (exclusive) real and all others replaced by stubs.

    It is built on the meta device; memory comes with the weights (see checkpoint/hub.py), after which `seal` must be
    called once.
    """

    def __init__(self, adapter: Adapter, start: int, stop: int) -> None:
        self.adapter = adapter
        self.start, self.stop = start, stop
        self.model = adapter.skeleton()
        self.port = Port()
        self.router_port = RouterPort(is_last=self.is_last)
        self._pending: dict[str, nn.Module] = {}
        self._strip()

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.adapter.layers[self.start : self.stop]

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.adapter.layers)

    def runs(self, stack: str) -> bool:
        """Whether any own layer, the head included, lies in this stack."""
        return any(layer.stack == stack for layer in self.layers)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters and persistent buffers that this stage needs, each tie under its source's name."""
        ties = self.model.all_tied_weights_keys
        names = dict.fromkeys(
            ties.get(name, name)
            for name in self.model.state_dict(keep_vars=True)
            if self.start <= self.adapter.layer_of(name) < self.stop or name.startswith(self._borrowed_tables())
        )
        return tuple(names)

    def _borrowed_tables(self) -> tuple[str, ...]:
        """Prefixes of the parameters in another stage's block that own blocks of the same stack use."""
        return tuple(
            f"{table}."
            for stack in self.adapter.stacks
            if any(layer.name in stack.blocks for layer in self.layers)
            and all(layer.name != stack.blocks[0] for layer in self.layers)
            for table in self.adapter.tables[stack.name]
        )

    def _strip(self) -> None:
        """Replace the layers of other stages by stubs, but for modules whose tied weight an own layer uses.

        Those stay until the weights are there, since transformers initialises and loads a tied weight through the
        module that it is tied to.
        """
        needed = set(self.parameter_names)
        ties = self.model.all_tied_weights_keys
        foreign = [
            (name, self._stub(index, name))
            for index, layer in enumerate(self.adapter.layers)
            if not self.start <= index < self.stop
            for name in layer.all_modules
        ]
        inside = tuple(f"{name}." for layer in self.adapter.layers for name in layer.all_modules)
        # Modules outside of every layer that hold weights, such as the `shared` of an encoder-decoder.
        for name, module in self.model.named_modules():
            if name and any(True for _ in module.parameters(recurse=False)) and not f"{name}.".startswith(inside):
                foreign.append((name, PassThrough()))
                resemble(foreign[-1][1], module)
        borrowed = self._borrowed_tables()
        for name, stub in foreign:
            module = self.model.get_submodule(name)
            if any(table.startswith(f"{name}.") for table in borrowed):
                hollow(module, name, borrowed)
                self._pending[name] = stub
                continue
            if any(ties.get(alias, alias) in needed for alias in (f"{name}.{n}" for n, _ in module.named_parameters())):
                self._pending[name] = stub
                continue
            self.model.set_submodule(name, stub)
        self.model.all_tied_weights_keys = {alias: source for alias, source in ties.items() if source in needed}

    def _stub(self, index: int, name: str) -> nn.Module:
        """What takes the place of module `name` of layer `index`, which is another stage's."""
        layer = self.adapter.layers[index]
        port = self.port if index == self.stop and name == layer.modules[0] else None
        stub = HeadStub(port) if layer.kind == "head" else self.adapter.stub(layer, name, port)
        resemble(stub, self.adapter.reference.get_submodule(name))
        return stub

    def seal(self, device: torch.device) -> None:
        """Complete the stage once its weights are in memory: the last stubs, dropout seeds and the entrance."""
        tied = dict(self.model.named_parameters(remove_duplicate=False))
        self._parameters = {n: tied[n] for n in self.parameter_names if n in tied}
        self._buffers = {n: b for n, b in self.model.named_buffers() if n in set(self.parameter_names)}
        for stack in self.adapter.stacks:
            own = [layer.name for layer in self.layers if layer.name in stack.blocks]
            if own and own[0] != stack.blocks[0]:
                lend_tables(self.model, self.adapter.tables[stack.name], stack.blocks[0], own[0])
        for name, stub in self._pending.items():
            self.model.set_submodule(name, stub)
        self._pending.clear()
        for module in self.model.modules():
            if isinstance(module, EmbeddingStub):
                module.zero = module.zero.to(device)
        for layer in self.layers:
            for position, name in enumerate(layer.modules):
                is_entrance = layer is self.layers[0] and layer.kind != "embedding" and position == 0
                admit(self.model.get_submodule(name), name, self.port, is_entrance=is_entrance)
        if self.adapter.routers:
            complete(self.model.get_submodule(self.adapter.stacks[-1].path), self.router_port)
        self.device = device
        self._generator = default_generator(device)
        self._layer_keys = {name: key(name) for layer in self.layers for name in layer.modules}
        self.model.train()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This stage's parameters by Hugging Face name, each tie once, under its source's name."""
        return self._parameters

    def compile_blocks(self, backend: str | None = None) -> None:
        """Compile each own block by torch.compile. Blocks of one kind share their code, so this costs one compilation.

        Args:
            backend: torch.compile's; None: its default.
        """
        for layer in self.layers:
            if layer.kind == "block":
                self.model.get_submodule(layer.name).compile(**({"backend": backend} if backend else {}))

    def checkpoint_blocks(self) -> None:
        """Recompute each block's forward within backward: transformers' own checkpointing of every block.

        The switches are set here and not by the model's method, which also looks for the input embeddings, that may be
        another stage's.
        """
        function = partial(checkpoint, use_reentrant=False)
        for module in self.model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module._gradient_checkpointing_func = function
                module.gradient_checkpointing = True

    def replace_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Put another tensor in a parameter's place, wherever this stage uses it."""
        old = self._parameters[name]
        for path, candidate in list(self.model.named_parameters(remove_duplicate=False)):
            if candidate is old:
                parent, _, leaf = path.rpartition(".")
                setattr(self.model.get_submodule(parent), leaf, parameter)
        self._parameters[name] = parameter

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """This stage's persistent buffers by Hugging Face name."""
        return self._buffers

    def __call__(self, inputs: Inputs, carry: Tensors, micro_batch_seed: int | None = None) -> dict[str, torch.Tensor]:
        """Run the stage on one micro-batch.

        Args:
            inputs: what `Adapter.prepare` returned, or transformers' `generate` prepared, on the stage's device.
            carry: the tensors received from the previous stage; empty on the first stage.
            micro_batch_seed: seed of dropout for this micro-batch and step; None leaves the generator alone.

        Returns:
            The carry for the next stage. On the last stage {"logits": (B, T, V)}, and from a mixture of experts with an
            auxiliary loss {"auxiliary_loss": ()}, times its coefficient.
        """
        if self.adapter.autocast is not None:
            # Autocast converts a leaf once for all its uses, so that their gradients would add up in half precision;
            # inside of the plain model these tensors are no leaves. To autocast a view is none either.
            carry = {name: tensor.view_as(tensor) for name, tensor in carry.items()}
        self.port.received = carry.get("hidden")
        self.router_port.open(self.adapter.routers, carry)
        if micro_batch_seed is not None and self.model.training:
            self.port.seeds = DropoutSeeds(self._generator, self._layer_keys, micro_batch_seed)
        try:
            # Its cache of converted weights lives as long as the scope, so a weight is never stale.
            with scope_of(self.adapter.autocast):
                return self.adapter.run(self, inputs, carry)
        finally:
            self.port.close()
            self.router_port.close()

    def captured(self) -> torch.Tensor:
        """The hidden states (B, T, D) at the end of the stage."""
        hidden = self.port.captured
        if hidden is None:
            last = self.layers[-1].name
            raise RuntimeError(f"the model's forward ended without passing the end of the stage, after layer {last!r}")
        return hidden
