"""What a save and a load ask of CUDA devices: pinned copies, few waits, and no second copy of a stage."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig

from hf_gpipe import Pipeline
from hf_gpipe.checkpoint.state import DataPosition, RunState
from tests.emulated_cuda.device import counting
from tests.emulated_cuda.processes import on_emulated_cuda
from tests.oracle import padded_batch, tiny_config


@on_emulated_cuda()
def test_a_save_copies_into_pinned_memory_and_waits_once_for_each_file(tmp_path: Path) -> None:
    config = tiny_config("llama", tied=False)
    pipe = Pipeline(config, 2, 2, device=["cuda:0", "cuda:1"])
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.train_step(padded_batch(config))
    optimizer.step()
    with counting() as counts:
        pipe.save_pretrained(tmp_path)
        writer = pipe.weights.writer()
        writer.begin(tmp_path, has_model=False)
        run = RunState(position=DataPosition(epoch=0, mini_batches=1), pipeline_step=1, data={})
        writer.add_state(dict(pipe.named_parameters()), optimizer, None, run)
        writer.copy()
        writer.write()
    assert not counts.pageable_copies, str(counts)
    assert len(counts.synchronisations) == 4, str(counts)  # two stages, weights and state


@on_emulated_cuda()
def test_loading_makes_no_second_copy_on_the_device(tmp_path: Path) -> None:
    """As at the end of a training with load_best_model_at_end, when the device is full."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2
    )
    pipe = Pipeline(config, 1, device="cuda:0")
    pipe.save_pretrained(tmp_path)
    size = sum(p.numel() * p.element_size() for p in pipe.parameters())
    torch.cuda.reset_peak_memory_stats("cuda:0")
    before = torch.cuda.memory_allocated("cuda:0")
    assert before >= size
    pipe.load_pretrained(tmp_path)
    assert torch.cuda.max_memory_allocated("cuda:0") - before < size / 20
