"""Stages whose layers are divided among processes compute what the plain model computes: losses and every gradient."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, Qwen3MoeConfig

from hf_gpipe import DistillationLoss, Pipeline
from hf_gpipe.errors import UserError
from hf_gpipe.losses.custom import LogitsLoss, RowLoss
from hf_gpipe.planner import decide
from hf_gpipe.settings.pipeline import PipelineConfig
from scripts.bench.models import quantisation
from tests.gloo import run_gloo
from tests.oracle import Batch, Result, assert_same, padded_batch, plain_model, run_plain, tiny_config
from tests.test_own_loss import Contrast
from tests.test_sequence_chunks import unverified


def _squares(log_probs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return log_probs.square()


def _of_logits(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


#: Seeds whose choices differ in all that can be drawn: experts and replicas, adapters, chunks and T = 4.
DRAWN = (0, 2, 4, 29)
#: In four processes: the family, T, and the rest of the pipeline.
PLAIN: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("llama", 2, {"num_stages": 2, "schedule": "1f1b", "recompute": "block"}),
    ("marian", 2, {"num_stages": 2, "schedule": "zb_h1", "recompute": "stage"}),
    ("llama", 4, {"num_stages": 1, "schedule": "gpipe", "recompute": "stage"}),
    ("marian", 4, {"num_stages": 1, "schedule": "gpipe", "recompute": "none"}),
)
VISITING = {"num_stages": 6, "num_processes": 2, "offload_weights": "all"}
COMPILED = {"num_stages": 2, "torch_compile": True, "torch_compile_backend": "eager"}
#: Beside others: the family, its dropout, and the pipeline. What is compared is the same in one process.
BESIDE: dict[str, tuple[str, float, dict[str, Any]]] = {
    "smoothed and clipped": ("llama", 0.0, {"num_stages": 2, "label_smoothing": 0.1, "logit_clipping": 0.3}),
    "uneven": ("uneven llama", 0.2, {"num_stages": 2, "recompute": "block"}),
    "dropout, stages again": ("marian", 0.2, {"num_stages": 2, "schedule": "1f1b", "recompute": "stage"}),
    "dropout, weights apart": ("marian", 0.2, {"num_stages": 2, "schedule": "zb_h1", "recompute": "none"}),
    "replicas": ("llama", 0.1, {"num_stages": 1, "replicas": 2, "schedule": "1f1b", "recompute": "stage"}),
    "packing": ("llama", 0.0, {"num_stages": 2, "packing": True}),
    "chunks": ("llama", 0.0, {"num_stages": 2, "schedule": "1f1b", "sequence_chunks": 3, "recompute": "stage"}),
    "interleaved": ("llama", 0.0, {"num_stages": 4, "num_processes": 2, "schedule": "interleaved_1f1b"}),
    "rows": ("llama", 0.0, {"num_stages": 2, "loss": RowLoss(_squares)}),
    "logits": ("llama", 0.0, {"num_stages": 2, "loss": LogitsLoss(_of_logits)}),
    "experts": ("qwen3_moe", 0.0, {"num_stages": 2, "schedule": "zb_h1", "recompute": "stage"}),
    "hidden states": ("llama", 0.0, VISITING | {"loss": Contrast()}),
    "teacher": ("llama", 0.0, COMPILED | {"loss": DistillationLoss(cross_entropy_share=0.3)}),
    "rounded": ("llama", 0.0, {"num_stages": 2, "boundary_dtype": "float32"}),
}


#: Of these cases the stages are on two workers, since it matters what crosses between them; of the others on one.
ON_TWO_WORKERS = (
    *("replicas", "packing", "chunks", "interleaved", "experts"),
    *("hidden states", "rounded"),
)
#: What these are evaluated and generate does not depend on the schedule, the recomputation and the loss.
GENERATING = ("uneven", "replicas", "interleaved", "experts")
EVALUATED = (*GENERATING, "packing", "hidden states", "rounded")


def config_of(family: str, heads: int = 4, dropout: float = 0.0) -> Any:
    """51 tokens, which two or four ranks cannot share evenly, and of llama fewer key-value heads than four ranks."""
    if family == "qwen3_moe":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 51}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        auxiliary = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
        made = Qwen3MoeConfig(**sizes, **experts, **auxiliary, num_attention_heads=heads, head_dim=8, pad_token_id=0)
        made._experts_implementation = "eager"
        return made
    if family == "marian":
        more = {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
        return tiny_config(family, dropout=dropout, vocab_size=51, **more)
    config = tiny_config(family.rpartition(" ")[2], dropout=dropout)
    if family.startswith("uneven"):  # three heads and 33 columns for two ranks
        heads, config.num_key_value_heads, config.intermediate_size = 3, 3, 33
        config.hidden_size = 24
    config.vocab_size, config.num_hidden_layers, config.num_attention_heads, config.head_dim = 51, 2, heads, 8
    return config


def whole_gradients(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """The gradients of all processes, whole, on each."""
    gradients = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    mine = {n: pipe.models[pipe.ties.owner_stage[n]].division.whole(n, gradient) for n, gradient in gradients.items()}
    found: dict[str, torch.Tensor] = {}
    for part in pipe.world.gather_objects(mine):
        for name, gradient in part.items():
            assert torch.equal(found.setdefault(name, gradient), gradient), name
    return found


def step(pipe: Pipeline, batch: Batch) -> tuple[Result, float]:
    """The loss and whole gradients of one step, which are added to those before, and their norm."""
    norms: list[float] = []
    loss = float(pipe.train_step(batch, update=lambda _, norm: norms.append(float(norm))))
    return Result(loss, whole_gradients(pipe)), norms[0]


def plain_steps() -> list[tuple[Result, float]]:
    found = []
    for family, size, options in PLAIN:
        config = config_of(family)
        pipe = Pipeline(plain_model(config), num_micro_batches=3, tensor_parallel=size, **options)
        found.append(step(pipe, padded_batch(config)))
    return found


def test_loss_and_gradients_are_those_of_the_plain_model() -> None:
    configs = {family: config_of(family) for family in ("llama", "marian")}
    plain = {family: run_plain(plain_model(config), padded_batch(config), 3) for family, config in configs.items()}
    for of_process in run_gloo(plain_steps, 4):
        for (family, *_), (found, norm) in zip(PLAIN, of_process, strict=True):
            assert_same(found, plain[family])
            assert norm == pytest.approx(plain[family].norm, rel=1e-10)


def beside(name: str, size: int, **mesh: int) -> tuple[list[tuple[Result, float]], tuple[Any, ...]]:
    """Two steps without a `zero_grad`, or one; and an evaluation, log-probabilities and generation."""
    family, dropout, options = BESIDE[name]
    config = config_of(family, dropout=dropout)
    if "offload_weights" in options:
        config.num_hidden_layers = 3  # which are enough for six stages
    if name == "teacher":  # whose blocks are compiled too
        options = options | {"teacher": plain_model(config, seed=7)}
    meshes = {"tensor_parallel": size} if size > 1 else {"replicas": 1, "num_processes": 1}
    pipe = Pipeline(plain_model(config), seed=3, **{"num_micro_batches": 3} | options | meshes | mesh)
    batch = padded_batch(config)
    if "torch_compile" in options:  # micro-batches of one shape: each is compiled
        batch = {key: tensor[:, :5] for key, tensor in batch.items()}
    # Dropout is another one in each step.
    steps = [step(pipe, batch) for _ in range(2 if dropout else 1)]
    if name not in EVALUATED:
        return steps, ()
    tokens = torch.zeros(0)
    if name in GENERATING:
        tokens = pipe.generate(input_ids=batch["input_ids"][:3, :3], max_new_tokens=3, num_beams=2)
    return steps, (float(pipe.eval_step(batch).loss), pipe.log_probs(batch), tokens)


def drawn(seed: int, size: int) -> tuple[Result, float]:
    """A step with choices that nobody made, in four processes; of T = 1 in one."""
    rng = Random(seed)
    family = rng.choice(("llama", "uneven llama", "marian", "qwen3_moe"))
    dropout = 0.0 if family == "qwen3_moe" else rng.choice((0.0, 0.2))
    config = config_of(family, dropout=dropout)
    config.tie_word_embeddings = family == "marian" or rng.random() < 0.5
    ranks = rng.choice((2, 4)) if family in ("llama", "marian") else 2
    num_stages, replicas = rng.choice(((2, 1), (1, 2), (4, 1))) if ranks == 2 else (rng.choice((1, 2)), 1)
    meshes = {"replicas": replicas, "num_processes": 4 // ranks, "tensor_parallel": ranks}
    schedule = "interleaved_1f1b" if (num_stages, ranks) == (4, 2) else rng.choice(("gpipe", "1f1b", "zb_h1"))
    options: dict[str, Any] = {"schedule": schedule, "recompute": rng.choice(("none", "stage", "block"))}
    if schedule == "zb_h1":
        options["recompute"] = "none"
    if "llama" in family and schedule == "1f1b" and rng.random() < 0.5:
        options["sequence_chunks"] = 2
    elif family == "llama":
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=4, lora_dropout=0.2, target_modules=rng.choice((["q_proj", "down_proj"], ["k_proj"])))
        lora.init_lora_weights = False
        options |= {"peft_config": lora}
    if size == 1:
        meshes = {"num_processes": 1}
    model, count = plain_model(config), rng.choice((2, 3, 4))
    if "peft_config" in options:
        model = config
        options |= {"dtype": torch.float64}
    pipe = Pipeline(model, num_stages, count, seed=3, attn_implementation="eager", **options | meshes)
    return step(pipe, padded_batch(config))


def of_classes(size: int, **mesh: int) -> tuple[Result, float]:
    """A step of a classifier, with noise on its embeddings."""
    config = config_of("llama")
    config.num_labels = 3
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").double().train()
    pipe = Pipeline(model, 2, 3, tensor_parallel=size, seed=3, **mesh)
    for stage in pipe.models.values():
        stage.add_noise(5.0)
    return step(pipe, padded_batch(config) | {"labels": torch.arange(6) % 3})


def in_half(size: int, **mesh: int) -> tuple[Result, float]:
    """A step under autocast, with gradients of weights apart."""
    config = config_of("llama")
    model, options = plain_model(config, dtype=torch.float32), {"autocast": torch.bfloat16, "tensor_parallel": size}
    return step(Pipeline(model, 2, 3, "zb_h1", "none", **options, **mesh), padded_batch(config))


def of_adapters(size: int, *, quantised: bool, **mesh: int) -> tuple[Result, float]:
    """A step of LoRA, with dropout, on a table, linear layers and a copy of the head, and with weights of 4 bits."""
    peft = pytest.importorskip("peft")
    config, dtype, options = config_of("llama", dropout=0.2), torch.float64, {}
    targets = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
    if quantised:
        config.hidden_size, config.head_dim, config.intermediate_size, dtype = 128, 32, 128, torch.float32
        options["quantization_config"] = quantisation("nf4+", "float32")
    else:
        targets.append("embed_tokens")
    lora = peft.LoraConfig(r=4, lora_dropout=0.3, use_rslora=True, target_modules=targets, modules_to_save=["lm_head"])
    lora.init_lora_weights = False  # then both factors have gradients
    options |= {"attn_implementation": "eager", "dtype": dtype, "peft_config": lora}
    pipe = Pipeline(config, 2, 3, "zb_h1", "none", tensor_parallel=size, seed=3, **options, **mesh)
    return step(pipe, padded_batch(config))


def on_one_worker(size: int) -> dict[str, Any]:
    one = {"num_processes": 1} if size > 1 else {}
    return {name: beside(name, size, **one) for name in BESIDE if name not in ON_TWO_WORKERS} | {
        "classes": of_classes(size, **one),
        "half": in_half(size, **one),
        "adapters": of_adapters(size, quantised=False, **one),
        "quantised": of_adapters(size, quantised=True, **one),
    }


def on_two_workers(size: int) -> dict[str, Any]:
    with unverified():
        found = {name: beside(name, size) for name in ON_TWO_WORKERS}
        return found | {f"drawn {seed}": drawn(seed, size) for seed in DRAWN}


@pytest.mark.parametrize(("run", "num_processes"), [(on_one_worker, 2), (on_two_workers, 4)])
def test_beside_everything_else_the_numbers_are_those_of_one_process(run: Any, num_processes: int) -> None:
    one, processes = run(1), run_gloo(run, num_processes, 2)
    alone = {"classes": 1e-10, "half": 0.02, "adapters": 1e-10, "quantised": 1e-5}
    alone |= {f"drawn {seed}": 1e-10 for seed in DRAWN}
    for of_process in processes:
        assert of_process.keys() == one.keys()
        for name, tolerance in alone.items():
            if name in one:
                (found, norm), (expected, expected_norm) = of_process.pop(name), one[name]
                assert_same(found, expected, tolerance)
                assert norm == pytest.approx(expected_norm, rel=max(tolerance, 1e-10)), name
        for name, (steps, others) in of_process.items():
            expected_steps, expected_others = one[name]
            for (found, norm), (expected, expected_norm) in zip(steps, expected_steps, strict=True):
                assert_same(found, expected)
                assert norm == pytest.approx(expected_norm, rel=1e-10), name
            assert len(others) == len(expected_others)
            if others:
                (loss, log_probs, tokens), (expected_loss, expected_log_probs, expected_tokens) = (
                    others,
                    expected_others,
                )
                assert loss == pytest.approx(expected_loss, rel=1e-10), name
                torch.testing.assert_close(log_probs, expected_log_probs)
                assert torch.equal(tokens, expected_tokens), name


def save(folder: str, source: str) -> None:
    """Save weights that were loaded as they are, and new ones."""
    for name, model in (("loaded", source), ("new", config_of("uneven llama"))):
        pipe = Pipeline(model, 2, 2, tensor_parallel=2, seed=5, dtype=torch.bfloat16)
        pipe.save_pretrained(Path(folder, name))
        pipe.load_pretrained(source)
        pipe.save_pretrained(Path(folder, f"{name}, loaded again"))
    pipe = adapted(2, seed=7)
    pipe.load_pretrained(Path(source, "adapters"))
    pipe.save_pretrained(Path(folder, "adapters"))


def adapted(size: int, seed: int) -> Pipeline:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "o_proj", "embed_tokens"], modules_to_save=["lm_head"])
    return Pipeline(config_of("llama"), 2, 2, tensor_parallel=size, seed=seed, peft_config=lora)


def test_files_are_bit_equal_to_those_of_one_process(tmp_path: Path) -> None:
    """And weights are slices of the same whole ones, read or new."""
    source = str(tmp_path / "source")
    new = Pipeline(config_of("uneven llama"), 2, 2, seed=5, dtype=torch.bfloat16)
    new.save_pretrained(source)
    adapted(1, seed=5).save_pretrained(Path(source, "adapters"))
    run_gloo(save, 4, str(tmp_path), source)
    expected = tensors_of(Path(source, "adapters"))
    found = tensors_of(tmp_path / "adapters")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    expected = tensors_of(Path(source))
    for name in ("loaded", "new", "loaded, loaded again", "new, loaded again"):
        found = tensors_of(tmp_path / name)
        assert found.keys() == expected.keys()
        assert all(
            torch.equal(found[one].view(torch.int16), tensor.view(torch.int16)) for one, tensor in expected.items()
        )


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in directory.glob("*.safetensors") for name, one in load_file(path).items()}


def planned() -> list[tuple[str | None, list[int], list[int], float, Any]]:
    """For a plan by rates and one by measured seconds: what the planner chose, the parameters of each stage in its
    plan, those that this process has of its own, the loss, and the speeds of the workers."""
    decide.profile_layers = partial(decide.profile_layers, repeats=1)  # type: ignore[attr-defined]
    config, found = config_of("llama"), []
    for partition, speeds in (("auto", None), ("profile", "profile")):
        options = {"partition": partition, "speeds": speeds}
        batch = padded_batch(config)
        pipe = Pipeline(plain_model(config), 2, 2, "1f1b", "none", tensor_parallel=2, example=batch, **options)
        own = [sum(p.numel() for p in model.parameters.values()) for model in pipe.models.values()]
        loss = step(pipe, batch)[0].loss
        stages = pipe.world.from_main(lambda pipe=pipe: [stage.num_parameters for stage in pipe.plan().stages])
        found.append((pipe.planned, stages, own, loss, pipe.config.speeds))
    return found


def test_the_planner_counts_what_a_rank_has() -> None:
    loss = run_plain(plain_model(config_of("llama")), padded_batch(config_of("llama")), 1).loss
    everyone = run_gloo(planned, 4)
    for rank, plans in enumerate(everyone):
        for why, stages, own, found, speeds in plans:
            assert why is not None
            assert found == pytest.approx(loss, rel=1e-10)
            assert speeds == everyone[0][1][-1] or speeds is None
            if rank % 2 == 0:  # it has 26 of the 51 tokens, and the longest parts are planned
                assert own == stages[rank // 2 : rank // 2 + 1]
        assert speeds is None or len(speeds) == 2
        assert "(profile)" in plans[1][0]


def test_what_does_not_go_together_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^schedule is pipedream and tensor_parallel is 2"):
        PipelineConfig(2, tensor_parallel=2, schedule="pipedream")
    with pytest.raises(UserError, match="tensor_parallel is 2 and there are 1 processes; start a multiple of 2"):
        Pipeline(config_of("llama"), 1, 1, tensor_parallel=2)
