"""What the CPU knows about padding: transformers asks no tensor for it, and makes the masks that it would have made."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_recurrent_attention_mask

from hf_gpipe import Pipeline
from hf_gpipe.adapters.attention.known_mask import KnownMask
from hf_gpipe.model.clone import exact_clone, padded_batch
from scripts.families import default_config

PADDED = torch.tensor([[1, 1, 1], [1, 1, 0]])


class Questions(TorchDispatchMode):
    """Counts the values of tensors that Python reads: on CUDA the host waits for each."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *product(["llama", "gemma3", "marian", "t5", "bert"], ["padded", "not padded", "without a mask"]),
        *product(["llama", "gemma3", "gpt2", "falcon"], ["packed"]),
    ],
)
def test_a_forward_reads_no_value(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact_clone(default_config(family), torch.float32)
    batch = padded_batch(model, with_images=False)
    if kind not in ("padded", "packed"):
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    if kind == "without a mask":
        del batch["attention_mask"]
    pipe = Pipeline(model, 1, 1, attn_implementation="sdpa" if kind == "packed" else None, packing=kind == "packed")
    questions, forward = Questions(), pipe.models[0].adapter.run

    def run(*args: Any) -> dict[str, torch.Tensor]:
        with questions:
            return forward(*args)

    pipe.models[0].adapter.run = run  # type: ignore[method-assign]
    # transformers 5.17 draws a number for each layer that it may leave out, on the CPU: no device waits for it.
    monkeypatch.setattr(torch, "rand", lambda size: 0.5)
    pipe.train_step(batch)
    assert questions.count == 0


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("mask", [PADDED, torch.ones_like(PADDED)])
@pytest.mark.parametrize("options", [{}, {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}])
def test_the_mask_is_the_one_that_transformers_makes(name: str, mask: torch.Tensor, options: dict[str, Any]) -> None:
    make = ALL_MASK_ATTENTION_FUNCTIONS[name]
    sizes = {"batch_size": 2, "q_length": 3, "kv_length": 3, "dtype": torch.float32, **options}
    found, expected = (make(attention_mask=one.bool(), **sizes) for one in (KnownMask.of(mask).to(torch.bool), mask))
    assert type(found) is type(expected)
    assert expected is None or torch.equal(found, expected)


def test_the_answer_stays_with_copies_only() -> None:
    mask = KnownMask.of(PADDED)
    for kept in (mask.to(torch.bool), mask.contiguous(), mask == 1):
        assert isinstance(kept, KnownMask)
        assert kept.is_padded
        assert not kept.all()
    assert KnownMask.of(torch.ones(2, 2)).to(torch.bool).all()
    for other in (mask[:, :2], mask == 0, 1 - mask, mask.all(dim=1), mask.cumsum(1), mask | True):
        assert type(other) is torch.Tensor
    assert torch.equal(mask.all(dim=1), torch.tensor([True, False]))


def test_linear_attention_gets_no_mask_where_nothing_is_padded() -> None:
    config, embeddings = default_config("llama"), torch.zeros(2, 3, 1)
    for mask, expected in ((PADDED, PADDED), (torch.ones_like(PADDED), None)):
        found = create_recurrent_attention_mask(config, embeddings, KnownMask.of(mask))
        assert found is expected is None or torch.equal(found, expected)


def test_a_mask_of_other_numbers_is_not_taken_for_ones() -> None:
    assert KnownMask.of(2 * torch.ones(1, 2)).is_padded
