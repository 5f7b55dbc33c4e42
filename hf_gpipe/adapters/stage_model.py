"""Consecutive layers of a Hugging Face model as the model of one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_gpipe.adapters.attention.document_positions import is_position_table, number_anew
from hf_gpipe.adapters.attention.position_tables import share_tables, strip_weights
from hf_gpipe.adapters.attention.whole_rows import read_whole_rows
from hf_gpipe.adapters.base import Adapter, Inputs, Tensors
from hf_gpipe.adapters.division import StageDivision, replace_tensor
from hf_gpipe.adapters.layers import Layer
from hf_gpipe.adapters.modules.autocast import scope_of
from hf_gpipe.adapters.modules.batch_norm import BatchNorms
from hf_gpipe.adapters.modules.dropout import DropoutSeeds, NoisyRows, default_generator, key
from hf_gpipe.adapters.modules.head import DeferredLogits, Projection
from hf_gpipe.adapters.modules.intercept import extend_class
from hf_gpipe.adapters.modules.kept_state import KeptState
from hf_gpipe.adapters.modules.kernels import Kernels, put_kernels
from hf_gpipe.adapters.modules.linear import hand_over
from hf_gpipe.adapters.modules.weight_gradients import WeightGradients
from hf_gpipe.adapters.parts.ranks import Ranks
from hf_gpipe.adapters.routers import RouterPort, RowsInParts, complete
from hf_gpipe.adapters.stubs import EmbeddingStub, HeadStub, PassThrough, Port, WholeSlices, admit, resemble
from hf_gpipe.errors import UserError
from hf_gpipe.libraries.transformers import GradientCheckpointingLayer, checkpoint_with
from hf_gpipe.registry import parts_of_modes


class StageModel:
    """The Hugging Face model with the layers `start` to `stop` (exclusive) real and all others replaced by stubs.

    It is built on the meta device and takes memory once it gets its weights (see checkpoint/stage_weights.py). Then
    `seal` must be called once.

    Attributes:
        parameters: once it is sealed, its parameters by Hugging Face name; a tied one once, under its source's name.
        buffers: its persistent buffers by Hugging Face name, once it is sealed.
    """

    def __init__(self, adapter: Adapter, start: int, stop: int) -> None:
        self.adapter = adapter
        self.start, self.stop = start, stop
        #: The stage's model; until its layers are chosen, the adapter's whole model.
        self.model = adapter.reference
        self.port = Port()
        self.router_port = RouterPort(is_last=self.is_last)
        self._projection: Projection | None = None
        #: Where the stage's linear layers put their weight gradients; None: autograd computes them.
        self.weight_gradients: WeightGradients | None = None
        self.recomputes_blocks = self._is_compiled = False
        self._noise: RemovableHandle | None = None
        self._pending: dict[str, nn.Module] = {}
        #: The division of the stage's tensors among processes.
        self.division = StageDivision()
        #: The part of a divided head that the stage has beside its layers; None: the head is a layer of the last stage.
        self.head: StageModel | None = None
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
        """Whether one of this stage's layers, the head included, is in this stack."""
        return any(layer.stack == stack for layer in self.layers)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters and persistent buffers that this stage needs; a tied one has its source's name."""
        ties, borrowed = self.model.all_tied_weights_keys, self._borrowed_tables()
        names = dict.fromkeys(
            ties.get(name, name)
            for name in self.model.state_dict(keep_vars=True)
            if self.start <= self.adapter.layer_of(name) < self.stop or name.startswith(borrowed)
        )
        return tuple(names)

    @property
    def shared_names(self) -> frozenset[str]:
        """Names of the `parameters` that another stage may use too: tied parameters, and tables of positions."""
        tables = tuple(f"{table}." for tables in self.adapter.tables.values() for table in tables)
        tied = set(self.model.all_tied_weights_keys.values())
        return frozenset(name for name in self.parameters if name in tied or name.startswith(tables))

    def _borrowed_tables(self) -> tuple[str, ...]:
        """Prefixes of the parameters in another stage's block that this stage's blocks of the same stack use."""
        return tuple(
            f"{table}."
            for stack in self.adapter.stacks
            if any(layer.name in stack.blocks for layer in self.layers)
            and all(layer.name != stack.blocks[0] for layer in self.layers)
            for table in self.adapter.tables[stack.name]
        )

    def _strip(self) -> None:
        """Copy the model with stubs in place of other stages' layers, except for modules whose tied weight it uses.

        Those modules stay until the weights are loaded, because transformers initialises and loads a tied weight
        through the module that it is tied to.
        """
        whole, needed = self.adapter.reference, set(self.parameter_names)
        ties = whole.all_tied_weights_keys
        foreign = [
            (name, self._stub(index, name))
            for index, layer in enumerate(self.adapter.layers)
            if not self.start <= index < self.stop
            for name in layer.all_modules
        ]
        inside = tuple(f"{name}." for layer in self.adapter.layers for name in layer.all_modules)
        # Modules outside of every layer that hold weights, such as the `shared` of an encoder-decoder.
        for name, module in whole.named_modules():
            if name and any(True for _ in module.parameters(recurse=False)) and not f"{name}.".startswith(inside):
                foreign.append((name, PassThrough()))
                resemble(foreign[-1][1], module)
        borrowed, stubs = self._borrowed_tables(), dict[str, nn.Module]()
        lenders = {name for name, _ in foreign if any(table.startswith(f"{name}.") for table in borrowed)}
        for name, stub in foreign:
            aliases = (f"{name}.{n}" for n, _ in whole.get_submodule(name).named_parameters())
            is_needed = name in lenders or any(ties.get(alias, alias) in needed for alias in aliases)
            (self._pending if is_needed else stubs)[name] = stub
        self.model = self.adapter.skeleton(stubs)
        for name in lenders:
            strip_weights(self.model.get_submodule(name), name, borrowed)
        self.model.all_tied_weights_keys = {alias: source for alias, source in ties.items() if source in needed}

    def _stub(self, index: int, name: str) -> nn.Module:
        """Return the stub that replaces module `name` of layer `index`, a layer of another stage."""
        layer = self.adapter.layers[index]
        port = self.port if index == self.stop and name == layer.modules[0] else None
        if layer.kind == "head" and self.adapter.has_head:
            stub: nn.Module = HeadStub(port, has_positions=self.adapter.is_classifier)
        else:
            stub = self.adapter.stub(layer, name, port)
        resemble(stub, self.adapter.reference.get_submodule(name))
        return stub

    def divide(self, ranks: Ranks) -> None:
        """Keep this rank's part of every divided layer. The stage has its weights, and is not sealed yet.

        Raises UserError where the model cannot be divided so.
        """
        for mode in parts_of_modes("stages").values():
            self.division = mode.divide(self, ranks)

    def seal(self, device: torch.device) -> None:
        """Complete the stage once its weights are in memory: insert the last stubs, the dropout seeds and the input."""
        tied = dict(self.model.named_parameters(remove_duplicate=False))
        names = dict.fromkeys(self.parameter_names)
        self.parameters: dict[str, nn.Parameter] = {n: tied[n] for n in names if n in tied}
        self.buffers: dict[str, torch.Tensor] = {n: b for n, b in self.model.named_buffers() if n in names}
        for stack in self.adapter.stacks:
            own = [layer.name for layer in self.layers if layer.name in stack.blocks]
            if own and own[0] != stack.blocks[0]:
                share_tables(self.model, self.adapter.tables[stack.name], stack.blocks[0], own[0])
        for name, stub in self._pending.items():
            self.model.set_submodule(name, stub)
        self._pending.clear()
        for module in self.model.modules():
            if isinstance(module, EmbeddingStub):
                module.blank = torch.zeros_like(module.blank, device=device)  # of fake tensors, where weights are
            elif isinstance(module, nn.ModuleList):
                extend_class(module, WholeSlices)
        for stack in self.adapter.stacks:
            # A table without weights, as M2M100's sines, belongs to no layer, and is in every stage.
            for name, module in self.model.get_submodule(stack.path).named_children():
                if is_position_table(name) and not isinstance(module, EmbeddingStub):
                    number_anew(module, stack.name, self.port)
        for layer in self.layers:
            for position, name in enumerate(layer.modules):
                is_entrance = layer is self.layers[0] and layer.kind != "embedding" and position == 0
                admit(self.model.get_submodule(name), name, self.port, is_entrance=is_entrance)
        if self.is_last and (projection := self.adapter.projection.names):
            self._projection = Projection(*(self.model.get_submodule(name) for name in projection))
        if self.adapter.routers:
            complete(self.model.get_submodule(self.adapter.stacks[-1].path), self.router_port)
        for module in self.model.modules():
            # A model in the model, all of whose layers are on other stages: transformers asks its weights.
            if isinstance(module, PreTrainedModel) and next(module.parameters(), None) is None:
                module._found_on = device, self.adapter.dtype
                extend_class(module, _WithoutWeights)
        self.device = device
        self._generator = default_generator(device)
        self._layer_keys = {name: key(name) for layer in self.layers for name in layer.modules}
        self.batch_norms = BatchNorms(self.model)
        self._kept = KeptState(self.model, self.adapter.kept)
        for module in self._kept.modules:
            read_whole_rows(module, self.port)
        self.model.train()

    def add_noise(self, alpha: float | None) -> None:
        """Add noise to the embeddings (B, T, D) of training, if this stage makes them (NEFTune, arXiv 2310.05914).

        It is uniform, at most alpha / sqrt(T D) with the T of the whole mini-batch, and is drawn from each row's own
        seed (`DropoutSeeds.noise`).

        Args:
            alpha: the strength of the noise; None: no noise, from now on.
        """
        if self._noise is not None:
            self._noise.remove()
            self._noise = None
        if alpha is None or not self.is_first:
            return

        def hook(module: nn.Module, args: Any, embedded: torch.Tensor) -> torch.Tensor:
            if self.port.seeds is None:
                return embedded
            return embedded + self.port.seeds.noise(embedded, alpha)

        self._noise = self.model.get_input_embeddings().register_forward_hook(hook)

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile each block of this stage by torch.compile. Blocks of one class share one compilation.

        Args:
            backend: the backend of torch.compile.

        Raises UserError where a block has a BatchNorm, whose statistics are noted while it runs, or would be recomputed
        with other random numbers.
        """
        if backend.startswith("eager") and self.recomputes_blocks and self.adapter.dropout:
            # Dynamo then runs torch.utils.checkpoint without the state of the random numbers: gradients are wrong.
            name, value = next(iter(self.adapter.dropout.items()))
            raise UserError(
                f"torch_compile_backend is {backend!r}, recompute is block and {name} is {value}: this backend draws "
                "other random numbers when it recomputes; use aot_eager, or let recompute be stage"
            )
        if self.batch_norms:
            raise UserError(
                f"torch_compile: {type(self.model).__name__} has a BatchNorm, whose statistics are noted in each "
                "forward, which a compiled one would not do; set torch_compile to false"
            )
        self._is_compiled = True
        for layer in self.layers:
            if layer.kind == "block":
                self.model.get_submodule(layer.name).compile(backend=backend)

    def use_kernels(self, kernels: Kernels) -> None:
        """Let modules of this stage run the kernels that `kernels_of` found for them."""
        names = (name for layer in self.layers for name in layer.all_modules)
        put_kernels(kernels, {name: self.model.get_submodule(name) for name in names})

    def defer_weight_gradients(self) -> WeightGradients:
        """Let the linear layers give their weight gradients to `weight_gradients`, from the next forward on.

        The head is left out: the gradient of its output is as large as the logits, and would be kept.

        Raises UserError if the blocks are compiled: their backward computes every gradient at once.
        """
        if self.weight_gradients is None or not self.weight_gradients.is_of_all:
            if self._is_compiled:
                raise UserError(
                    "the schedule has the gradients of weights (W) apart from those of inputs (I), and torch.compile "
                    "compiles both into one backward; set torch_compile to false, or use a schedule without I and W, "
                    "such as 1f1b"
                )
            self.weight_gradients = self.weight_gradients or WeightGradients()
            self.weight_gradients.is_of_all = True
            for layer in self.layers:
                if layer.kind != "head":
                    for name in layer.all_modules:
                        hand_over(self.model.get_submodule(name), self.weight_gradients)
        return self.weight_gradients

    def overlap_sums(self) -> None:
        """Let gradients of weights be computed while gradients of their layers' inputs are summed over the ranks.

        It changes nothing where the layers are whole, or the blocks compiled: their backward is one piece.
        """
        if self.division.has_sums and not self._is_compiled:
            self.weight_gradients = self.weight_gradients or WeightGradients()
            self.division.overlap(self.model, self.weight_gradients)

    def checkpoint_blocks(self) -> None:
        """Let each block's forward run again in backward: by transformers' gradient checkpointing, or of a chain here.

        The model's own method is not called, because it looks for the input embeddings, which may be on another stage.
        """
        self.recomputes_blocks = True
        function = partial(checkpoint, use_reentrant=False)
        if not self.adapter.stacks:
            for layer in self.layers:
                for name in layer.modules:
                    module = self.model.get_submodule(name)
                    own = vars(module).get("forward") or partial(_forward_of_class, module)
                    module.forward = partial(function, own)
            return
        # A model that is told so too may keep keys and values from its blocks, as GPT-2 does; it runs nothing again,
        # unless its blocks do not do it themselves.
        modules = [*self.model.modules()]
        for module in [one for one in modules if isinstance(one, GradientCheckpointingLayer)] or modules:
            if hasattr(module, "gradient_checkpointing"):
                checkpoint_with(module, self._anew(module, function) if self._kept else function)

    def _anew(self, block: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function that checkpoints a block, which then begins as in a new model also when it runs again."""

        def run(forward: Callable[..., Any], *args: Any) -> Any:
            self._kept.restore(block)
            return forward(*args)

        return lambda forward, *args: function(partial(run, forward), *args)

    def replace_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Replace a parameter by another tensor, wherever this stage uses it."""
        for model in self.models:
            replace_tensor(model, self.parameters[name], parameter)
        self.parameters[name] = parameter

    def adopt(self, head: StageModel, division: StageDivision, *, is_first: bool) -> None:
        """Take a part of the head beside the stage's layers.

        Args:
            head: the model of the head, with this part.
            division: the division of the head among processes.
            is_first: whether this is the first stage of its process, which has the tensors that belong to no layer.
        """
        self.head, self.division = head, division
        if is_first:
            self.parameters = {**head.parameters, **self.parameters}
            self.buffers = {**head.buffers, **self.buffers}

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The Hugging Face models with this stage's layers: one, and the head's where the stage has a part of it."""
        return (self.model,) if self.head is None else (self.model, self.head.model)

    @property
    def projection(self) -> nn.Linear:
        """The linear layer of the head that makes the logits."""
        layer: nn.Linear = self.model.get_submodule(self.adapter.projection.names[0])
        return layer

    def deferred_logits(self) -> DeferredLogits | None:
        """Return what records a forward without logits; None: the stage makes no logits, or must make them whole."""
        return None if self._projection is None else DeferredLogits()

    def __call__(
        self,
        inputs: Inputs,
        carry: Tensors,
        micro_batch_seed: int | None = None,
        deferred: DeferredLogits | None = None,
        rows: NoisyRows = NoisyRows(),
        routers: RowsInParts | None = None,
        row_length: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run the stage on one micro-batch.

        Args:
            inputs: as returned by `Adapter.prepare` or prepared by transformers' `generate`, on the stage's device.
            carry: the tensors received from the previous stage; empty on the first stage.
            micro_batch_seed: seed of dropout for this micro-batch and step; None leaves the generator alone.
            deferred: made by `deferred_logits`; the logits are left out, and can be computed by it.
            rows: the rows of the micro-batch, from which the noise on their embeddings follows.
            routers: the router logits of the rows, where the inputs are a part of them; None: rows are whole.
            row_length: the number of tokens of the whole rows, of which the inputs are a part; None: rows are whole.

        Returns:
            The carry for the next stage. On the last stage {"logits": (B, T, V)} unless they are deferred; for a
            mixture of experts with an auxiliary loss also {"auxiliary_loss": ()}, times its coefficient. It is
            computed from whole rows, with their last tokens; an earlier part of the rows returns 0.
        """
        if self.adapter.autocast is not None:
            # Autocast converts a leaf once for all its uses, so their gradients would be summed in half precision.
            # In the plain model these tensors are not leaves, and for autocast a view is not a leaf either.
            carry = {name: tensor.view_as(tensor) for name, tensor in carry.items()}
        # In generation a forward goes on from the one before it.
        if self._kept and (row_length is not None or not _goes_on(inputs)):
            self._kept.restore()
        self.port.received = carry.get("hidden")
        self.router_port.open(self.adapter.routers, carry, routers)
        # Positions that are given begin anew already.
        self.port.lengths = {} if "position_ids" in inputs else self.adapter.document_lengths(inputs)
        self.port.row_length = None if "position_ids" in inputs else row_length
        try:
            with self._seeded(micro_batch_seed, rows):
                if deferred is None or self._projection is None:
                    outputs = self.adapter.run(self, inputs, carry)
                    if "logits" in outputs:
                        outputs["logits"] = self.division.logits(outputs["logits"])
                    return outputs
                return self._projection.run(lambda: self.adapter.run(self, inputs, carry), deferred)
        finally:
            self.router_port.close()

    @torch.no_grad()
    def computed_once(self, inputs: Inputs, micro_batch_seed: int) -> Inputs:
        """Do what `Adapter.computed_once` does, with the dropout of this micro-batch."""
        with self._seeded(micro_batch_seed):
            return self.adapter.computed_once(self, inputs)

    @contextmanager
    def _seeded(self, micro_batch_seed: int | None, rows: NoisyRows = NoisyRows()) -> Iterator[None]:
        """Context manager of a forward: mixed precision, and seeds of dropout. At the end the port is empty."""
        if micro_batch_seed is not None and self.model.training:
            self.port.seeds = DropoutSeeds(self._generator, self._layer_keys, micro_batch_seed, rows)
        try:
            with scope_of(self.adapter.autocast):
                yield
        finally:
            self.port.close()

    def captured(self) -> torch.Tensor:
        """The hidden states (B, T, D) at the end of the stage."""
        hidden = self.port.captured
        if hidden is None:
            last = self.layers[-1].name
            raise RuntimeError(f"the model's forward ended without passing the end of the stage, after layer {last!r}")
        return hidden


class _WithoutWeights:
    """Mixed into the class of a module: see `StageModel.seal`."""

    _found_on: tuple[torch.device, torch.dtype]

    @property
    def device(self) -> torch.device:
        return self._found_on[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._found_on[1]


def _goes_on(inputs: Inputs) -> bool:
    """Whether a forward has the cache of forwards before it."""
    cache = inputs.get("past_key_values")
    return cache is not None and cache.get_seq_length() > 0


def _forward_of_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of the class that a module has now, as layers that defer weight gradients change theirs."""
    return type(module).forward(module, *args, **kwargs)
