"""Whether the layers of a model can be divided among ranks: a tiny clone says so before use."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

import torch
from transformers import PreTrainedModel

from hf_gpipe.adapters import Adapter, Blueprint, build_adapter
from hf_gpipe.adapters.modules.dropout import masks_of
from hf_gpipe.adapters.tensor_parallel.adapted import plan_of
from hf_gpipe.adapters.tensor_parallel.emulated import emulate
from hf_gpipe.adapters.tensor_parallel.ranks import Ranks
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.errors import CheckpointError, UnsupportedModelError, UserError, one_line
from hf_gpipe.model.clone import attention_of, exact_clone, padded_batch
from hf_gpipe.model.exactness import compared_once
from hf_gpipe.model.steps import Step, split_step
from hf_gpipe.settings.division import Division

_STAGES = 3
#: The largest difference of a clone, of the gradient norm. Parts that the library computes in float32 round in another
#: way when shapes change; a wrong division differs by 1e-3 and more.
_TOLERANCE = 1e-6


def check_division(adapter: Adapter, division: Division, *, is_compiled: bool = False) -> None:
    """Raise UserError where the layers of a model, whose blocks may be compiled, cannot be divided so."""
    if division.is_whole:
        return
    others = {
        "the model is no Hugging Face model that reads text": not isinstance(adapter, TextAdapter),
        "functions of its modules were replaced": bool(adapter.patches),
    }
    for what, is_so in others.items():
        if is_so:
            raise UserError(f"{division.text} and {what}, which do not go together; leave tensor_parallel out")
    assert isinstance(adapter, TextAdapter)
    verify_division(adapter, division)
    for name, probability in adapter.dropout.items() if is_compiled else ():
        # What draws the masks (masks.py) breaks compiled code into pieces, and with some backends draws them twice.
        raise UserError(
            f"{division.text}, torch_compile is true and {name} is {probability}, which do not go together: "
            f"a compiled block may draw other masks; leave torch_compile out, or set {name} to 0"
        )


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Context manager in which reasons why layers cannot be divided become errors that name the key."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{key} {error}, or leave tensor_parallel out") from None


def verify_division(adapter: TextAdapter, division: Division) -> None:
    """Compare a tiny clone whose layers are divided with one whose layers are whole, once for equal clones.

    Args:
        adapter: the model's.
        division: of the model, which needs as many heads as there are ranks. The clone, which has four, has two ranks;
            four where ranks share key-value heads, and three where the model's parts are not even. It has the model's
            probabilities of dropout, so that masks are compared too.

    Raises:
        UnsupportedModelError: loss or gradients differ, or no rule divides a layer of the family.
        UserError: the model has fewer heads or columns than ranks.
    """
    with _naming(f"{division.text} and"):
        plan = plan_of(adapter, division.num_ranks)
    is_shared = any(cut.is_shared for cut in plan.cuts.values())
    of_clone = Division(3 if not plan.is_even else 4 if is_shared else 2)
    what = f"divided {of_clone!r} {attention_of(adapter)} {masks_of(adapter.config)}"
    compared_once(adapter, what, lambda: _difference(adapter, of_clone))


def _difference(adapter: TextAdapter, division: Division) -> float:
    """How far the step of a divided clone is from that of the clone. Raises UnsupportedModelError if too far."""
    family, key = adapter.given_config.model_type, "tensor_parallel"
    try:
        given, dtype = adapter.blueprint, torch.float64
        model = exact_clone(given.config, dtype, adapter.compared_class, trust_remote_code=given.trust_remote_code)
        model.set_attn_implementation(attention_of(adapter))
        for path, probability in masks_of(adapter.config).items():
            *configs, name = path.split(".")
            setattr(reduce(getattr, configs, model.config), name, probability)
        clone = build_adapter(Blueprint(model.config, dtype, attention_of(adapter), type(model)))
        (expected,) = divided_steps(model, clone, Division())
        steps = divided_steps(model, clone, division)
        difference = max(step.difference(expected) for step in steps)
    except CheckpointError:
        difference = float("inf")  # of a weight that ranks have alike
    except Exception as error:
        if isinstance(error.__cause__, UserError):
            with _naming(f"{key}:"):
                raise error.__cause__ from None
        reason = one_line(str(error), 300)
        raise UnsupportedModelError(f"{family}: {key} fails on a tiny clone: {reason}") from error
    if not difference <= _TOLERANCE:
        raise UnsupportedModelError(
            f"{family}: with {key} a tiny clone has other gradients, by {difference:.0e} of their norm; leave it out"
        )
    return difference


def divided_steps(model: PreTrainedModel, adapter: TextAdapter, division: Division) -> list[Step]:
    """A step of a clone in stages whose layers are divided among ranks, as each rank has it, with whole gradients."""
    batch, num_stages = padded_batch(model), min(_STAGES, len(adapter.layers))

    def run(ranks: Ranks | None = None) -> Step:
        return split_step(copy.deepcopy(model), adapter, batch, num_stages, ranks=ranks)

    return [run()] if division.is_whole else emulate(division, run)
