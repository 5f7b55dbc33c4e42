"""The structure of a family's model, observed on a tiny clone, so that no family needs a description.

The clone runs once with hooks on every module. The order of the calls gives the model's stacks of blocks, the modules
that run before and after them, how a block gets its hidden states and in which form it returns them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_gpipe.adapters.layers import Given, Stack, StackName
from hf_gpipe.adapters.modules.autocast import Autocast, scope_of
from hf_gpipe.adapters.modules.head import FoundProjection, find_projection
from hf_gpipe.adapters.modules.intercept import hidden_of
from hf_gpipe.adapters.modules.kept_state import Kept, observe_kept
from hf_gpipe.adapters.observation.skeleton import Blueprint, build
from hf_gpipe.adapters.observation.tiny import tiny_config
from hf_gpipe.adapters.text_entries import text_entries
from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.libraries.transformers import with_eager_experts

BATCH, SOURCE_LENGTH, TARGET_LENGTH = 2, 6, 5
#: The number of tokens that is added to these in the forwards that show what modules keep: more than `LENGTH_LIMIT`.
_MORE_TOKENS = 5


@dataclass(frozen=True)
class ObservedRouter:
    """A router of a mixture of experts: its path in a block, its class and the type of its logits."""

    path: str
    class_name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Observation:
    """A model's stacks in the order in which they are called.

    Attributes:
        stacks: one stack, or the encoder's and the decoder's.
        head: the modules that ran last: mostly one, and of a classifier of rows those from the last on that got the
            hidden states of all tokens; empty: a block ran last, in a model without a head.
        projection: the linear layer in the head that makes the logits, if they can be made in parts.
        embeddings: modules before the blocks whose input is not hidden states.
        inputs: the first tensor that each module outside of the blocks, and each stack's first block, received.
        routers: the routers from whose logits the auxiliary loss is computed; empty without that loss.
        constants: parameters outside of the blocks that no gradient can reach, such as a table of sines.
        encoder_dtype: type of the encoder's output; None without an encoder.
        embedding_tables: the tables that were looked up.
        kept: what modules keep from one forward to the next.
    """

    stacks: tuple[Stack, ...]
    head: tuple[str, ...]
    projection: FoundProjection
    embeddings: frozenset[str]
    inputs: dict[str, Given]
    routers: tuple[ObservedRouter, ...]
    constants: frozenset[str]
    encoder_dtype: torch.dtype | None = None
    embedding_tables: frozenset[str] = frozenset()
    kept: Kept = field(default_factory=dict)


_Form: TypeAlias = tuple[int | None, Given]
"""The number of outputs of a module, None for hidden states alone, and the shape and type of these."""


@dataclass
class _Calls:
    """The calls of one forward: when each module was entered and left, its inputs and outputs."""

    entered: dict[str, list[int]] = field(default_factory=dict)
    left: dict[str, list[int]] = field(default_factory=dict)
    forms: dict[str, _Form | None] = field(default_factory=dict)
    inputs: dict[str, Given] = field(default_factory=dict)
    outputs: dict[str, type] = field(default_factory=dict)
    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    result: Any = None
    clock: int = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock


#: The observations, by the clone's configuration and by the model's, from which a clone's takes milliseconds.
_observations: dict[str, Observation] = {}


def observe_family(blueprint: Blueprint, autocast: Autocast | None = None) -> Observation:
    """Observe a tiny clone of a model. Equal clones are observed once."""
    config = blueprint.config
    what = f"{blueprint.model_class} {type(config).__name__} {blueprint.dtype} {autocast}"
    try:
        given = f"{what} as given {config.to_json_string(use_diff=False)}"
        if given in _observations:
            return _observations[given]
        tiny = tiny_config(config)
    except Exception as error:
        raise UnsupportedModelError(
            f"{config.model_type}: no configuration of a tiny clone can be made of the model's: "
            f"{type(error).__name__}: {error}"
        ) from error
    with_eager_experts(tiny)  # grouped matrix products do not support every type
    tiny.dtype = None  # that of the weights is given
    identity = f"{what} {tiny.to_json_string(use_diff=False)}"
    if identity not in _observations:
        try:
            with torch.random.fork_rng(devices=[]):
                clone = build(replace(blueprint, config=tiny, attn_implementation=None))
        except Exception as error:
            raise UnsupportedModelError(
                f"{config.model_type}: a tiny clone of the model cannot be built: {type(error).__name__}: {error}"
            ) from error
        _observations[identity] = observe(clone, autocast)
    _observations[given] = _observations[identity]
    return _observations[identity]


def observe(model: PreTrainedModel, autocast: Autocast | None = None) -> Observation:
    """Run a tiny model once, under `autocast` and on its device if given, and return its structure.

    Raises:
        UnsupportedModelError: the forward fails, or does not run one list of blocks (two for an encoder-decoder)
            in order, each block once.
    """
    family = model.config.model_type or type(model).__name__
    try:
        long, short = partial(_forward, model, autocast, _MORE_TOKENS), partial(_forward, model, autocast)
        kept, calls = observe_kept(model, (long, short)), _run(model, autocast)
    except Exception as error:
        raise UnsupportedModelError(
            f"{family}: a tiny clone of the model does not run on ids alone: {type(error).__name__}: {error}"
        ) from error
    lists = _block_lists(model, calls)
    expected = 2 if model.config.is_encoder_decoder else 1
    if len(lists) != expected:
        names = ", ".join(lists) or "none"
        raise UnsupportedModelError(
            f"{family}: expected {expected} list(s) of blocks that run in order, each block once; found {names}"
        )
    lists.sort(key=lambda name: calls.entered[f"{name}.0"][0])
    units = _units(model, lists)
    if repeated := [name for name in units if len(calls.entered.get(name, ())) > 1]:
        raise UnsupportedModelError(f"{family}: {repeated[0]!r} runs more than once in a forward")
    order = sorted((name for name in units if name in calls.entered), key=lambda name: calls.entered[name][0])
    first_block = [calls.entered[f"{name}.0"][0] for name in lists]
    parents = [name.rpartition(".")[0] for name in lists]
    before: list[list[str]] = [[] for _ in lists]
    after: list[list[str]] = [[] for _ in lists]
    for unit in order:
        when = calls.entered[unit][0]
        stack = _stack_of(unit, when, parents, first_block)
        (before if when < first_block[stack] else after)[stack].append(unit)
    has_logits = "logits" in calls.result
    if not after[-1] and has_logits:
        raise UnsupportedModelError(f"{family}: nothing with weights runs after the blocks; a head is needed")
    is_classifier = has_logits and calls.result.logits.dim() == 2
    head = _head(model, after[-1], calls) if is_classifier else tuple(after[-1][-1:])
    after[-1] = after[-1][: len(after[-1]) - len(head)]
    idle = tuple(name for name in units if name not in calls.entered)
    stack_names: tuple[StackName, ...] = ("encoder", "decoder") if len(lists) == 2 else ("decoder",)
    stacks = []
    for i, name in enumerate(lists):
        forms = {calls.forms[f"{name}.{j}"] for j in range(len(model.get_submodule(name)))}
        form = forms.pop()
        if forms or form is None:
            raise UnsupportedModelError(f"{family}: the blocks of {name!r} return hidden states in different forms")
        output = calls.outputs.get(parents[i], type(calls.result))
        of_stack = () if i else idle
        stacks.append(Stack(stack_names[i], name, tuple(before[i]), (), tuple(after[i]), *form, of_stack, output))
    embeddings = {name for units_before in before for name in units_before if calls.forms[name] is None}
    inputs = {
        name: calls.inputs[name]
        for name in (*units, *(f"{block_list}.0" for block_list in lists))
        if name in calls.inputs
    }
    encoded = getattr(calls.result, "encoder_last_hidden_state", None)
    constants = _constants(model, units, calls.result)
    if not has_logits or not head:
        projection = FoundProjection((), "there are none")
    elif is_classifier:
        projection = FoundProjection((), "they are those of rows, and not of tokens")
    else:
        projection = find_projection(
            model, head[0], calls.entered, calls.result.logits, lambda: _forward(model, autocast)
        )
    return Observation(
        tuple(stacks),
        head,
        projection,
        frozenset(embeddings),
        inputs,
        _routers(model, calls, lists),
        constants,
        None if encoded is None else encoded.dtype,
        frozenset(name for name in calls.entered if isinstance(model.get_submodule(name), nn.Embedding)),
        kept,
    )


def tiny_batch(model: PreTrainedModel, more_tokens: int = 0) -> dict[str, torch.Tensor]:
    """Return inputs for the tiny clone: random ids without padding, with `more_tokens` in each row."""
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    vocabulary = min(config.vocab_size, model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(3, vocabulary, (BATCH, SOURCE_LENGTH + more_tokens), generator=generator)
    batch = text_entries(ids, torch.ones_like(ids))
    if model.config.is_encoder_decoder:
        shape = (BATCH, TARGET_LENGTH + more_tokens)
        batch["decoder_input_ids"] = torch.randint(3, vocabulary, shape, generator=generator)
    return batch


def _run(model: PreTrainedModel, autocast: Autocast | None = None) -> _Calls:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    calls = _Calls()
    handles = []

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.entered.setdefault(name, []).append(calls.tick())
            if isinstance(given := hidden_of(args, kwargs), torch.Tensor):
                calls.inputs.setdefault(name, Given(tuple(given.shape), given.dtype))

        return hook

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.left.setdefault(name, []).append(calls.tick())
            calls.forms[name] = _form(args, kwargs, output)
            calls.outputs[name] = type(output)
            returned = output if isinstance(output, tuple) else (output,)
            calls.tensors[name] = [tensor for tensor in returned if isinstance(tensor, torch.Tensor)]

        return hook

    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
            handles.append(module.register_forward_hook(leave(name), with_kwargs=True))
    try:
        calls.result = _forward(model, autocast)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _forward(model: PreTrainedModel, autocast: Autocast | None, more_tokens: int = 0) -> Any:
    device = torch.device("cpu") if autocast is None else autocast.device
    batch = {name: tensor.to(device) for name, tensor in tiny_batch(model, more_tokens).items()}
    # With a graph, from which `_constants` reads what gradients reach.
    with torch.enable_grad(), scope_of(autocast):
        return model.eval().to(device)(**batch, use_cache=False)


def _form(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> _Form | None:
    """Form in which a call returned hidden states; None where the first output has not the shape of the input."""
    hidden = hidden_of(args, kwargs)
    several = isinstance(output, tuple | list) and len(output) > 0
    returned = output[0] if several else output
    if not (isinstance(hidden, torch.Tensor) and isinstance(returned, torch.Tensor) and hidden.shape == returned.shape):
        return None
    return (len(output) if several else None, Given(tuple(returned.shape), returned.dtype))


def _block_lists(model: PreTrainedModel, calls: _Calls) -> list[str]:
    """Names of the outermost module lists whose modules all ran once, one after the other."""
    lists: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        if any(name.startswith(f"{outer}.") for outer in lists):
            continue
        entered = [calls.entered.get(f"{name}.{i}", []) for i in range(len(module))]
        left = [calls.left.get(f"{name}.{i}", []) for i in range(len(module))]
        if any(len(times) != 1 for times in (*entered, *left)):
            continue
        # Modules of a list of alternatives or of branches do not run one after the other.
        spans = [(start[0], end[0]) for start, end in zip(entered, left, strict=True)]
        if all(earlier[1] < later[0] for earlier, later in pairwise(spans)):
            lists.append(name)
    return lists


def _routers(model: PreTrainedModel, calls: _Calls, lists: list[str]) -> tuple[ObservedRouter, ...]:
    """The modules in the blocks whose outputs are the router logits of the auxiliary loss."""
    if getattr(calls.result, "aux_loss", None) is None:
        return ()
    seen: dict[str, ObservedRouter] = {}
    # Some models of transformers 5.17 lose them, and their loss is 0.
    for logits in calls.result.router_logits or (torch.empty(0),):
        name = next((n for n, tensors in calls.tensors.items() if any(t is logits for t in tensors)), "")
        block_list = next((candidate for candidate in lists if name.startswith(f"{candidate}.")), None)
        weight = getattr(model.get_submodule(name), "weight", None)
        if block_list is None or weight is None or tuple(logits.shape) != (BATCH * SOURCE_LENGTH, weight.shape[0]):
            raise UnsupportedModelError(
                f"{model.config.model_type}: the logits of the experts' routers cannot be followed from stage to "
                "stage; set output_router_logits to false in the model's configuration"
            )
        path = name.removeprefix(f"{block_list}.").partition(".")[2]
        seen.setdefault(path, ObservedRouter(path, type(model.get_submodule(name)).__name__, logits.dtype))
    return tuple(seen.values())


def _head(model: PreTrainedModel, after: list[str], calls: _Calls) -> tuple[str, ...]:
    """The modules that make the logits (B, C) of rows: from the last one that gets hidden states (B, T, D) on.

    Raises UnsupportedModelError where there is none, or where the logits are not the last one's output: for each row,
    or at one of its tokens.
    """
    got = [number for number, name in enumerate(after) if name in calls.inputs and len(calls.inputs[name].shape) == 3]
    logits, made = calls.result.logits, calls.tensors[after[-1]][0]
    is_of_token = made.dim() == 3 and bool((made == logits[:, None]).all(dim=-1).any(dim=1).all())
    if not got or not (is_of_token or (made.shape == logits.shape and bool((made == logits).all()))):
        raise UnsupportedModelError(
            f"{model.config.model_type}: {type(model).__name__} cannot be split; among the classes of "
            "AutoModelForSequenceClassification those can whose logits are those of a token, or that pool the hidden "
            "states in modules with weights"
        )
    return tuple(after[got[-1] :])


def _constants(model: PreTrainedModel, units: list[str], result: Any) -> frozenset[str]:
    """Names of the parameters of `units` that are not in the graph of what the loss reads: logits or hidden states."""
    reached: set[Any] = set()
    outputs = (getattr(result, name, None) for name in ("logits", "last_hidden_state", "aux_loss"))
    nodes: set[Any] = {output.grad_fn for output in outputs if isinstance(output, torch.Tensor)} - {None}
    while nodes:
        node = nodes.pop()
        reached.add(node)
        nodes |= {following for following, _ in node.next_functions} - reached - {None}
    trained = {id(node.variable) for node in reached if hasattr(node, "variable")}
    named = ((f"{unit}.{name}", p) for unit in units for name, p in model.get_submodule(unit).named_parameters())
    return frozenset(name for name, parameter in named if id(parameter) not in trained)


def _units(model: PreTrainedModel, lists: list[str]) -> list[str]:
    """The outermost modules that have weights and contain no blocks; layers other than blocks consist of them."""
    units: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        if name in lists:
            return
        if not any(block_list.startswith(f"{name}." if name else "") for block_list in lists):
            if next(module.parameters(), None) is not None:
                units.append(name)
            return
        if own := [n for n, _ in module.named_parameters(recurse=False)]:
            raise UnsupportedModelError(
                f"{model.config.model_type}: {name or 'the model'!r} has weights of its own outside of any layer: {own}"
            )
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return units


def _stack_of(unit: str, when: int, parents: list[str], first_block: list[int]) -> int:
    """The stack that a unit belongs to: the one whose module holds it, else the one that it runs before or after."""
    if len(parents) == 1:
        return 0
    inside = [i for i, parent in enumerate(parents) if parent and unit.startswith(f"{parent}.")]
    if inside:
        return inside[0]
    return 0 if when < first_block[0] else len(parents) - 1
