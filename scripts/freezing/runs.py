"""The runs of `numbers`: a pipeline of a tiny model with the options of a mode, its steps, and what it then answers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig
from torch import nn
from torch.nn import functional as F
from transformers import (
    BitsAndBytesConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedConfig,
    ViTConfig,
    ViTForImageClassification,
)

from hf_gpipe import DistillationLoss, EmbeddingLoss, LogitsLoss, Pipeline, RowLoss
from hf_gpipe.modes.host_graphs import copies as offload
from hf_gpipe.tasks.dpo import PreferenceLoss
from hf_gpipe.tasks.grpo.loss import GRPOLoss
from hf_gpipe.tasks.kto import KTOLoss
from hf_gpipe.tasks.reward import RewardLoss
from scripts.freezing.toys import Batch, batch_of, config_of, model_of

STEPS, ROWS = 4, 8


@dataclass(frozen=True)
class Run:
    """Steps of a pipeline.

    Attributes:
        family: of the model.
        options: of `Pipeline`.
        processes: how many, joined by gloo.
        config: changes of the model's configuration.
        inputs: other entries of a mini-batch: those of "rollouts", "judged" rows, or "scores" of pairs; "triplets": a
            multiple of three rows.
        dtype: of the weights.
        generates: the options of `generate` after the steps, each with its name.
        head: of a model that predicts no text: "score", "classes" or "tokens" of a Llama, "vit" or "batch norm" for
            images.
    """

    family: str = "llama"
    options: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = ""
    dtype: torch.dtype = torch.float64
    generates: tuple[str, ...] = ("greedy",)
    head: str = ""


def lora(**options: Any) -> LoraConfig:
    values = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    return LoraConfig(**values | options)


def four_bits(kind: str) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind.removesuffix("+"),
        bnb_4bit_use_double_quant=kind.endswith("+"),
        bnb_4bit_compute_dtype="float32",
    )


def margins(log_probs: torch.Tensor, inputs: Any) -> torch.Tensor:
    """A loss of the user's own, of pairs of rows."""
    first, second = log_probs.view(-1, 2).unbind(1)
    return -F.logsigmoid(0.3 * (first - second)) + 0.01 * first**2


def focal(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the user's own, of logits."""
    logits = outputs.logits[:, :-1].transpose(1, 2)
    nll = F.cross_entropy(logits, labels[:, 1:], reduction="none")
    return ((1 - torch.exp(-nll)) ** 2 * nll).sum() / num_items_in_batch


def of(stages: int, schedule: str = "1f1b", recompute: Any = "stage", **options: Any) -> dict[str, Any]:
    """Options of a pipeline."""
    return {"num_stages": stages, "schedule": schedule, "recompute": recompute, **options}


TWO, FOUR = {"processes": 2}, {"processes": 4}
LORA: dict[str, Any] = {"peft_config": lora()}
ALL = ("greedy", "sample", "beams")
SCHEDULES = ("naive", "gpipe", "gpipe_fused", "1f1b", "interleaved_1f1b", "breadth_first", "zb_h1", "zb_h2")

RUNS: dict[str, Run] = {
    # Families.
    "llama": Run(options=of(2), generates=ALL),
    "llama tied": Run(options=of(3), config={"tied": True}, generates=ALL),
    "llama dropout": Run(options=of(2), config={"dropout": 0.1}),
    "gemma2": Run("gemma2", of(2, "gpipe")),
    "gpt2 tied dropout": Run("gpt2", of(2), config={"tied": True, "dropout": 0.1}),
    "mixtral": Run("mixtral", of(3), generates=ALL),
    "mixtral in processes": Run("mixtral", of(2, "zb_h1", "none"), **TWO),
    "qwen3_moe": Run("qwen3_moe", of(2, "gpipe", "block")),
    "marian tied dropout": Run("marian", of(4, num_processes=2), config={"tied": True, "dropout": 0.1}, **TWO),
    "m2m_100": Run("m2m_100", of(3)),
    "bart tied": Run("bart", of(3, "gpipe"), config={"tied": True}, generates=ALL),
    "t5": Run("t5", of(2), generates=ALL),
    "t5 tied": Run("t5", of(3), config={"tied": True}),
    "t5 tied in processes": Run("t5", of(2, recompute="none"), config={"tied": True}, **TWO),
    "bert": Run("bert", of(2, loss=EmbeddingLoss()), generates=("embed",)),
    # Schedules, in one process and in two.
    **{f"schedule {name}": Run(options=of(4, name)) for name in SCHEDULES},
    **{f"schedule {name}": Run(options=of(2, name, num_processes=1)) for name in ("zb_v", "v_half")},
    **{
        f"schedule {name} in processes": Run(options=of(2, name), **TWO)
        for name in ("naive", "gpipe", "zb_h1", "zb_h2")
    },
    **{
        f"schedule {name} in processes": Run(options=of(4, name, num_processes=2), **TWO)
        for name in ("interleaved_1f1b", "breadth_first", "zb_v", "v_half")
    },
    # Recomputation.
    **{f"recompute {mode}": Run(options=of(3, recompute=mode)) for mode in ("none", "block", "host")},
    "recompute a list": Run(options=of(4, recompute=[1, "none", 2, "block"])),
    "recompute dropout": Run("marian", of(2, recompute="block"), config={"dropout": 0.1}),
    # Chunks.
    "chunks": Run(options=of(2, sequence_chunks=3)),
    "chunks tapered": Run(options=of(2, "gpipe", sequence_chunks=3, chunk_taper=0.5)),
    "chunks in processes": Run(options=of(2, "zb_h1", "none", sequence_chunks=2), **TWO),
    "chunks host": Run(options=of(2, "gpipe", "host", sequence_chunks=2)),
    "chunks visits": Run(options=of(4, "breadth_first", offload_weights="all", sequence_chunks=2)),
    "chunks packing": Run(options=of(2, sequence_chunks=2, packing=True)),
    "chunks replicas": Run(options=of(2, sequence_chunks=2, replicas=2, num_processes=4), **FOUR),
    "chunks tensor": Run(options=of(2, sequence_chunks=2, tensor_parallel=2, num_processes=1), **TWO),
    # Weights that visit.
    "visits all": Run(options=of(4, "breadth_first", offload_weights="all"), generates=ALL),
    "visits all tied": Run("bart", of(4, "breadth_first", offload_weights="all"), config={"tied": True}),
    "visits frozen": Run(options=of(4, "breadth_first", offload_weights="frozen", **LORA)),
    "visits in processes": Run(options=of(6, "breadth_first", offload_weights="all", num_processes=2), **TWO),
    "visits tensor": Run(
        options=of(4, "breadth_first", offload_weights="all", tensor_parallel=2, num_processes=1), **TWO
    ),
    "dealt": Run(options=of(4, "round_robin", offload_weights="all", num_processes=2), generates=ALL, **TWO),
    "dealt tied": Run(
        options=of(4, "round_robin", offload_weights="all", num_processes=2), config={"tied": True}, **TWO
    ),
    "dealt replicas": Run(options=of(4, "round_robin", offload_weights="all", replicas=2, num_processes=4), **FOUR),
    # Graphs on the host.
    "host in processes": Run(options=of(2, "gpipe", "host"), **TWO),
    "host split": Run(options=of(2, "zb_h1", "host")),
    "host replicas": Run(options=of(1, "gpipe", "host", replicas=2, num_processes=2), **TWO),
    # A divided head.
    "vocab_1f1b": Run(options=of(2, "vocab_1f1b"), generates=ALL, **TWO),
    "vocab_gpipe tied": Run(options=of(2, "vocab_gpipe", "none"), config={"tied": True}, **TWO),
    "vocab replicas": Run(options=of(2, "vocab_1f1b", replicas=2, num_processes=4), **FOUR),
    "vocab one process": Run(options=of(3, "vocab_gpipe", "block")),
    "vocab host": Run(options=of(3, "vocab_gpipe", "host")),
    # Tensor parallelism.
    "tensor": Run(options=of(2, tensor_parallel=2, num_processes=1), generates=ALL, **TWO),
    "tensor stages": Run(options=of(2, "zb_h1", "none", tensor_parallel=2, num_processes=2), **FOUR),
    "tensor marian tied": Run("marian", of(2, tensor_parallel=2, num_processes=1), config={"tied": True}, **TWO),
    "tensor lora": Run(options=of(2, tensor_parallel=2, num_processes=1, **LORA), **TWO),
    "tensor replicas": Run(options=of(1, tensor_parallel=2, replicas=2, num_processes=2), **FOUR),
    "tensor host": Run(options=of(2, "gpipe", "host", tensor_parallel=2, num_processes=1), **TWO),
    "tensor packing": Run(options=of(2, tensor_parallel=2, num_processes=1, packing=True), **TWO),
    # Asynchrony.
    **{
        f"asynchronous {name}": Run(options=of(2, name), **TWO)
        for name in ("pipedream", "pipedream_vertical", "pipedream_2bw", "pipedream_naive")
    },
    "asynchronous one process": Run(options=of(3, "pipedream", "none")),
    "asynchronous naive one process": Run(options=of(3, "pipedream_naive", "stage")),
    "asynchronous host": Run(options=of(3, "pipedream", "host")),
    "asynchronous replicas": Run(options=of(2, "pipedream", replicas=[2, 1], num_processes=3), processes=3),
    # Replicas and updates.
    "replicas": Run(options=of(2, replicas=2, num_processes=4), generates=ALL, **FOUR),
    "replicas unequal": Run(options=of(2, "gpipe", "none", replicas=[1, 2], num_processes=3), processes=3),
    "zero": Run("marian", of(2, replicas=2, zero=1, num_processes=4), config={"tied": True, "dropout": 0.1}, **FOUR),
    "zero split": Run(options=of(1, "zb_h1", "none", replicas=2, zero=1, num_processes=2), **TWO),
    "placement": Run(options=of(4, "gpipe", placement="0 1 1 0", num_processes=2), **TWO),
    # Packing and cutting.
    "packing": Run(options=of(2, packing=True)),
    "packing marian": Run("marian", of(2, recompute=[1, "none"], packing=True), config={"dropout": 0.1}),
    "packing in processes": Run(options=of(2, "zb_h1", "none", packing=True), **TWO),
    "length bucketing": Run(options=of(2, length_bucketing=True)),
    "partition": Run(options=of(2, partition=[5, 2])),
    "partition by parameters": Run(options=of(2, partition="parameters", example=batch_of(config_of("llama")))),
    # Types.
    "float32": Run(options=of(2), dtype=torch.float32),
    "bfloat16": Run(options=of(2), dtype=torch.bfloat16, generates=()),
    "autocast": Run(options=of(2, autocast=torch.bfloat16), dtype=torch.float32, generates=()),
    "autocast float16": Run(options=of(2, autocast=torch.float16), dtype=torch.float32, generates=()),
    "narrow messages": Run(options=of(2, boundary_dtype="bfloat16"), dtype=torch.float32, **TWO),
    "compiled": Run(options=of(2, torch_compile=True, torch_compile_backend="eager"), dtype=torch.float32),
    # Adapters.
    "lora": Run(options=of(2, **LORA), generates=ALL),
    "lora in processes": Run(options=of(2, "zb_h1", "none", **LORA), **TWO),
    "lora marian": Run("marian", of(2, **LORA), config={"tied": True, "dropout": 0.1}),
    "lora modules": Run(
        options=of(2, peft_config=lora(target_modules=["q_proj"], modules_to_save=["lm_head"], lora_dropout=0.1))
    ),
    "dora": Run(options=of(2, peft_config=lora(use_dora=True))),
    **{
        f"qlora {kind}": Run(
            options=of(2, quantization_config=four_bits(kind), **LORA),
            config={"hidden_size": 64, "intermediate_size": 128, "head_dim": 32},
            dtype=torch.float32,
        )
        for kind in ("nf4", "nf4+", "fp4")
    },
    "qlora int8": Run(
        options=of(2, quantization_config=BitsAndBytesConfig(load_in_8bit=True), **LORA),
        config={"hidden_size": 64, "intermediate_size": 128, "head_dim": 32},
        dtype=torch.float32,
        generates=(),
    ),
    "qlora visits": Run(
        options=of(4, "breadth_first", offload_weights="frozen", quantization_config=four_bits("nf4"), **LORA),
        config={"hidden_size": 64, "intermediate_size": 128, "head_dim": 32},
        dtype=torch.float32,
    ),
    # Losses.
    "loss smoothed": Run(options=of(2, label_smoothing=0.1, logit_clipping=2.0)),
    "loss of rows": Run(options=of(2, loss=RowLoss(margins, rows_per_unit=2))),
    "loss of logits": Run(options=of(2, loss=LogitsLoss(focal))),
    **{
        f"loss preference {kind}": Run(options=of(2, loss=PreferenceLoss(0.5, kind), **LORA))
        for kind in (*("sigmoid", "ipo", "hinge", "sigmoid_norm", "apo_zero", "apo_down"), "sppo_hard", "nca_pair")
    },
    "loss preference reference_free": Run(options=of(2, loss=PreferenceLoss(0.5, reference_free=True))),
    "loss preference smoothed": Run(options=of(2, loss=PreferenceLoss(0.5, "sigmoid", 0.1), **LORA)),
    "loss preference robust": Run(options=of(2, loss=PreferenceLoss(0.5, "robust", 0.1), **LORA)),
    "loss preference bco_pair": Run(options=of(2, loss=PreferenceLoss(0.5, "bco_pair"), **LORA)),
    "loss preference cpo": Run(options=of(2, loss=PreferenceLoss(0.5, "cpo", cpo_alpha=0.7))),
    "loss preference simpo": Run(options=of(2, loss=PreferenceLoss(0.5, "simpo", simpo_gamma=0.4, cpo_alpha=0.0))),
    "loss preference orpo": Run(options=of(2, loss=PreferenceLoss(0.5, "orpo"))),
    "loss preference in processes": Run(options=of(2, loss=PreferenceLoss(0.5), **LORA), **TWO),
    "loss kto": Run(options=of(2, loss=KTOLoss(0.4, "kto", 1.0, 0.7), **LORA), inputs="judged"),
    "loss kto apo": Run(options=of(2, loss=KTOLoss(0.4, "apo_zero_unpaired"), **LORA), inputs="judged"),
    **{
        f"loss grpo {kind}": Run(
            options=of(2, loss=GRPOLoss(0.04, kind, 9, use_bias_correction_kl=False, **more)), inputs="rollouts"
        )
        for kind, more in {
            "grpo": {"epsilon_high": 0.28},
            "bnpo": {"importance_sampling_level": "sequence"},
            "dr_grpo": {"delta": 1.5},
            "dapo": {"temperature": 0.7},
        }.items()
    },
    **{
        f"loss embedding {kind}": Run(
            options=of(2, loss=EmbeddingLoss(kind, **more)), inputs=inputs, generates=("embed",)
        )
        for kind, inputs, more in (
            ("multiple_negatives", "", {}),
            ("triplet", "triplets", {"margin": 0.5, "distance": "cosine"}),
        )
    },
    "loss embedding cosine": Run("bert", of(2, loss=EmbeddingLoss("cosine")), inputs="scores", generates=("embed",)),
    "loss embedding matryoshka": Run(
        options=of(2, loss=EmbeddingLoss(matryoshka_dims=(16, 8)), replicas=2, num_processes=4),
        inputs="",
        generates=("embed",),
        **FOUR,
    ),
    "loss distillation": Run(options=of(2, loss=DistillationLoss(beta=0.0), teacher=...)),
    "loss distillation reverse": Run(options=of(3, loss=DistillationLoss(beta=1.0, temperature=2.0), teacher=...)),
    "loss distillation mixed": Run(
        options=of(2, "zb_h1", "none", loss=DistillationLoss(beta=0.3, cross_entropy_share=0.4), teacher=...), **TWO
    ),
    "teacher tensor": Run(
        options=of(2, loss=DistillationLoss(beta=0.5), teacher=..., tensor_parallel=2, num_processes=1), **TWO
    ),
    "teacher host": Run(options=of(2, "gpipe", "host", loss=DistillationLoss(beta=0.5), teacher=...)),
    # Models that predict no text.
    "loss reward": Run(options=of(2, loss=RewardLoss(0.01)), generates=(), head="score"),
    "classes": Run(options=of(2, **LORA), generates=(), head="classes"),
    "classes in processes": Run(options=of(2, "zb_h1", "none"), generates=(), head="classes", **TWO),
    "classes of tokens": Run(options=of(2), generates=(), head="tokens"),
    "images vit": Run(options=of(2, "gpipe"), generates=(), head="vit"),
    "images batch norm": Run(options=of(3, "gpipe"), generates=(), head="batch norm"),
    "images batch norm in processes": Run(options=of(2, "1f1b", "none"), generates=(), head="batch norm", **TWO),
    "images replicas": Run(
        options=of(2, "gpipe", replicas=2, num_processes=4), generates=(), head="batch norm", **FOUR
    ),
}


def text_of(name: str) -> str:
    """Loss and gradient norm of each step of a run, and what the trained model then says; in each of its processes."""
    run = RUNS[name]
    with patch.object(offload, "SMALLEST_BYTES", 1):  # graphs of tiny models move to the host too
        return _text(run)


def _text(run: Run) -> str:
    lines: list[str] = []
    config = config_of(run.family, **run.config)
    options = dict(run.options)
    if options.get("teacher") is ...:
        options["teacher"] = model_of(config_of("llama", hidden_size=24, num_hidden_layers=5), seed=7)
    if run.head:
        model: Any = _with_head(config, run.head)
        if run.head in IMAGES:
            options["example"] = _batch(config, run, 0)
    elif "quantization_config" in options:
        model = _saved(config)
    else:
        model = model_of(config, dtype=run.dtype)
    torch.manual_seed(0)
    options.setdefault("num_micro_batches", 4)
    pipe = Pipeline(model, attn_implementation=None, device="cpu", **_own(options))
    for number, (loss, norm) in enumerate(_steps(pipe, config, run)):
        lines.append(f"step {number} loss {loss!r} norm {norm!r}")
    lines.append(f"weights {_size(pipe)!r}")
    lines += _answers(pipe, config, run)
    return "\n".join(lines)


def _own(options: dict[str, Any]) -> dict[str, Any]:
    """The options with copies of what a pipeline may change or what counts."""
    return {name: copy.deepcopy(value) if name in ("peft_config", "loss") else value for name, value in options.items()}


def _saved(config: PreTrainedConfig) -> str:
    """A directory with a model in float32, for a loader that quantises what it reads."""
    import tempfile

    folder = tempfile.mkdtemp(prefix="hf_gpipe-freeze-model-")
    model_of(config, dtype=torch.float32).save_pretrained(folder)
    return folder


IMAGES = ("vit", "batch norm")


class _Residual(nn.Module):
    """A convolution with BatchNorm beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.convolution(x)).relu()


def _with_head(config: Any, head: str) -> nn.Module:
    """A model with a head of its own, in float64."""
    torch.manual_seed(0)
    if head == "batch norm":
        layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), _Residual(), nn.Flatten(), nn.Linear(144, 6))
        return nn.Sequential(*layers, nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)).double().train()
    if head == "vit":
        sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
        images = ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.0)
        return ViTForImageClassification(images).double().train()
    config.classifier_dropout = 0.0
    config.num_labels = {"score": 1, "classes": 3, "tokens": 2}[head]
    made = LlamaForTokenClassification if head == "tokens" else LlamaForSequenceClassification
    return made(config).double().train()


def _steps(pipe: Pipeline, config: PreTrainedConfig, run: Run) -> list[tuple[float, float]]:
    batches = [_batch(config, run, seed) for seed in range(STEPS)]
    if pipe.runs_windows:
        of_stages = {stage: _optimizer(model.parameters.values()) for stage, model in pipe.models.items()}
        pairs = pipe.train_window([[batch] for batch in batches], lambda stage, *_: of_stages[stage].step()).tolist()
        return [(loss, norm) for loss, norm in pairs]
    optimizer = _optimizer(pipe.parameters())
    if pipe.config.zero:
        pipe.shard_optimizer(optimizer)
    numbers: list[tuple[float, float]] = []
    norms: list[float] = []

    def update(loss: torch.Tensor, norm: torch.Tensor) -> None:
        norms.append(float(norm))
        optimizer.step()

    for batch in batches:
        loss = pipe.train_step(batch, update=update)
        pipe.zero_grad()
        numbers.append((float(loss), norms[-1]))
    return numbers


def _optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Adam divides by the root of the gradient's square: a small eps would make numbers of the rounding of zeros."""
    return torch.optim.AdamW([one for one in parameters if one.requires_grad], lr=1e-2, eps=1e-4)


def _size(pipe: Pipeline) -> float:
    """The norm of all trained weights, where each weight counts once, whatever processes have it."""
    own = {
        name: float((parameter.detach().double() ** 2).sum())
        for name, parameter in pipe.named_parameters()
        if parameter.requires_grad
    }
    if pipe.config.tensor_parallel > 1:
        return 0.0  # each process has a part of some of them
    every = {name: value for part in pipe.world.gather_objects(own) for name, value in part.items()}
    return float(sum(every[name] for name in sorted(every)) ** 0.5)


def _batch(config: PreTrainedConfig, run: Run, seed: int) -> Batch:
    """The mini-batch of a step."""
    rows = 9 if run.inputs == "triplets" else ROWS
    generator = torch.Generator().manual_seed(seed)
    if run.head in IMAGES:
        entry = "pixel_values" if run.head == "vit" else "pixels"
        pixels = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {entry: pixels, "labels": torch.randint(0, 3, (rows,), generator=generator)}
    batch = batch_of(config, rows, seed)
    if run.head == "tokens":
        batch["labels"] = torch.where(batch["labels"] < 0, -100, batch["labels"] % 2)
    elif run.head:
        labels = torch.randint(0, 3, (rows,), generator=generator)
        batch["labels"] = labels if run.head == "classes" else labels / 4
    if run.inputs == "judged":
        batch["desirable"] = torch.arange(rows) % 3 > 0
        other = batch_of(config, rows, seed + 100)
        batch |= {f"KL_{name}": value for name, value in other.items()}
    if run.inputs == "scores":
        batch["labels"] = torch.rand(rows, generator=generator)
    if run.inputs == "rollouts":
        log_probs = -4 + torch.rand(batch["labels"].shape, generator=generator, dtype=torch.float64)
        batch |= {
            "labels": batch["labels"].masked_fill(torch.arange(batch["labels"].shape[1]) < 2, -100),
            "advantages": torch.randn(rows, generator=generator),
            "old_logps": log_probs,
            "ref_token_logps": log_probs.flip(0) + 0.3,
        }
    return batch


def _answers(pipe: Pipeline, config: PreTrainedConfig, run: Run) -> list[str]:
    """The loss of an evaluation, likelihoods, embeddings and generated tokens."""
    batch = _batch(config, run, 50)
    lines = [f"evaluation {float(pipe.eval_step(batch).loss)!r}"]
    if "embed" in run.generates:
        return [*lines, f"embeddings {[float(row.norm()) for row in pipe.embed(batch)]}"]
    if not run.generates:
        return lines
    lines.append(f"likelihoods {pipe.log_probs(batch).tolist()}")
    if not (config.is_encoder_decoder or pipe.config.shares_last_layer):
        lines.append(f"of tokens {pipe.token_log_probs(batch).sum(1).tolist()}")
    ids = batch["input_ids"][:3, :5]
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "sample": {"do_sample": True, "top_k": 5, "temperature": 0.8},
        "beams": {"num_beams": 3},
    }
    for way in run.generates:
        torch.manual_seed(3)
        tokens = pipe.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **ways[way])
        lines.append(f"{way} {tokens.tolist()}")
    return lines
