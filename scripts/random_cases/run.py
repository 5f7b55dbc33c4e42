"""Run a case, and compare it with the plain model looped over the same micro-batches."""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe import Pipeline
from hf_gpipe.adapters import IGNORED_LABEL, Adapter, adapter_for
from hf_gpipe.adapters.observation.skeleton import Blueprint, build
from hf_gpipe.adapters.observation.tiny import tiny_config
from hf_gpipe.adapters.packing import documents_of
from hf_gpipe.errors import UserError
from hf_gpipe.model.clone import Batch, randomise, turn_randomness_off
from hf_gpipe.model.reference import TOLERANCES, Step, plain_run
from hf_gpipe.pipeline.exactness import FLOAT32_LOGITS_TOLERANCE
from hf_gpipe.runtime.cutting import split_rows, split_tokens
from hf_gpipe.tasks.distil import DistillationLoss
from scripts.families import default_config
from scripts.random_cases.draw import Case, draw, random_table
from scripts.random_cases.fields import apply, changes
from scripts.random_cases.in_float64 import in_float64

#: Gradients whose norm is smaller than so many times the rounding of 1 are rounding.
_LEAST_NORM = 0.1

RIGHT, REFUSED, NOT_RUNNABLE, WRONG = "right", "refused", "not runnable", "wrong"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: one of the four words above, and the difference or the error."""

    case: Case
    verdict: str
    detail: str


class NotRunnable(Exception):  # noqa: N818  # not an error of ours
    """The plain model cannot be built, or does not run on its own."""


def examine(seed: int, number: int, names: tuple[str, ...]) -> Outcome:
    """Draw case `number` of a seed, with changes of its configuration, and run it."""
    case, rng = draw(seed, number, names)
    try:
        config = tiny_config(default_config(case.family))
        case = replace(case, changes=changes(config, rng, rng.choice([0, 1, 1, 2, 2, 3, 4])))
        if case.packing and getattr(apply(config, case.changes).get_text_config(), "output_router_logits", False):
            case = replace(case, packing=False)  # the auxiliary loss is that of the packed micro-batches
    except Exception as error:
        return Outcome(case, NOT_RUNNABLE, first_line(error))
    return run(case)


def reduced(outcome: Outcome, attempts: int = 60) -> Outcome:
    """The simplest case near a wrong one that is wrong too."""
    for _ in range(attempts):
        for simpler in outcome.case.simpler():
            attempts -= 1
            if attempts < 0:
                return outcome
            if (result := run(simpler)).verdict == WRONG:
                outcome = result
                break
        else:
            return outcome
    return outcome


def run(case: Case) -> Outcome:
    """Run a case."""
    try:
        try:
            with in_float64():
                largest, tolerance = _difference(case)
        except Exception as error:
            # Of the weights of a few models some are always float32.
            if "dtype" not in str(error) or "double" not in str(error):
                raise
            largest, tolerance = _difference(case)
            tolerance = max(tolerance, FLOAT32_LOGITS_TOLERANCE)
    except NotRunnable as error:
        return Outcome(case, NOT_RUNNABLE, str(error))
    except UserError as error:
        return Outcome(case, REFUSED, first_line(error))
    except Exception as error:
        return Outcome(case, WRONG, f"{type(error).__name__}: {first_line(error)}")
    finally:
        if "compiled" in case.modes:
            torch._dynamo.reset()  # after some functions of one code it compiles no more
    return Outcome(case, RIGHT if largest <= tolerance else WRONG, f"{largest:.1e}")


def first_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def _difference(case: Case) -> tuple[float, float]:
    """The largest difference between stages and plain model, and the largest that rounding explains."""
    model, batches, whole = _plain(case)
    with tempfile.TemporaryDirectory() as folder:
        pipe = _pipeline(case, model, Path(folder))
        if whole is None or "teacher" in case.modes:
            kept = tuple(mode for mode in case.modes if mode == "teacher")
            plain_case = replace(case, num_stages=1, schedule="gpipe", recompute="none", cut=None, modes=kept)
            expected = _step(_pipeline(plain_case, model, Path(folder)), batches)
            return difference(_step(pipe, batches), expected), TOLERANCES[model.dtype]
        expected = _expected(case, model, batches, pipe.adapter)
        tolerance = TOLERANCES[model.dtype] if expected.dtype == model.dtype else FLOAT32_LOGITS_TOLERANCE
        if not (case.packing or case.length_bucketing) and (trimmed := difference(expected, whole)) > tolerance:
            return trimmed, tolerance
        return difference(_step(pipe, batches), expected), tolerance


def difference(step: Step, expected: Step) -> float:
    """As `Step.difference`, but no gradient is a gradient of 0: an expert without tokens has the one or the other.

    So is a gradient that is rounding alone, such as that of the bias of attention's keys, which changes nothing.
    """
    names = step.gradients.keys() | expected.gradients.keys()
    either = step.gradients | expected.gradients
    steps = [
        replace(side, gradients={name: side.gradients.get(name, torch.zeros_like(either[name])) for name in names})
        for side in (step, expected)
    ]
    if max(side.norm for side in steps) < _LEAST_NORM * torch.finfo(expected.dtype).eps:
        steps = [replace(side, gradients={}) for side in steps]
    return steps[0].difference(steps[1])


def _plain(case: Case) -> tuple[PreTrainedModel, list[Batch], Step | None]:
    """The plain model, the mini-batches, and their step without any preparation; None if it is random.

    Raises NotRunnable.
    """
    try:
        config = _configuration(case)
        failure: Exception | None = None
        for dtype in TOLERANCES:
            try:
                model = plain_model(config, dtype, case)
                batches = mini_batches(case, model)
                parts = _micro_batches(case, batches)
                step, again = (plain_run(model, parts, case.label_smoothing) for _ in range(2))
                break
            except Exception as error:
                failure = failure or error
        else:
            assert failure is not None
            raise failure
    except Exception as error:
        raise NotRunnable(f"{type(error).__name__}: {first_line(error)}") from error
    if not 0 < step.norm < float("inf") or not abs(step.loss) < float("inf"):
        raise NotRunnable(f"the plain model's gradient norm is {step.norm} and its loss {step.loss}")
    is_random = not step.difference(again) <= 1e-12
    return model, batches, None if is_random else step


def _configuration(case: Case) -> PreTrainedConfig:
    return apply(tiny_config(default_config(case.family)), case.changes)


def plain_model(config: PreTrainedConfig, dtype: torch.dtype, case: Case) -> PreTrainedModel:
    """The whole model with random weights; what is frozen, and adapters, are there."""
    turn_randomness_off(config)
    for name, value in case.changes.items():
        if name.endswith("policy"):
            setattr(config, name, value)
    if case.dropout:
        _set_dropout(config, case.dropout)
    config._experts_implementation = "eager"  # grouped matrix products do not support float64
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.number)
        try:
            model = randomise(build(Blueprint(config, dtype, case.attention)))
        except ValueError as error:
            if "does not support an attention implementation" not in str(error):
                raise
            model = randomise(build(Blueprint(config, dtype, "eager")))
        if case.lora:
            model = _with_lora(model, dtype, Random(case.number))
    if case.frozen is not None:
        rng = Random(case.frozen)
        share = rng.choice([0.2, 0.5, 0.9])
        layers = sorted({name.rpartition(".")[0].rpartition(".")[0] for name, _ in model.named_parameters()})
        trained = rng.choice([name for name, _ in model.named_parameters()])
        frozen = tuple(f"{layer}." for layer in layers if rng.random() < share)
        for name, parameter in model.named_parameters():
            if name.startswith(frozen) and name != trained:
                parameter.requires_grad_(False)
    return model


def _set_dropout(config: Any, rate: float) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _set_dropout(value, rate)
        elif isinstance(value, float) and "drop" in name and "layerdrop" not in name:
            setattr(config, name, rate)


def _with_lora(model: PreTrainedModel, dtype: torch.dtype, rng: Random) -> PreTrainedModel:
    from peft import LoraConfig, get_peft_model

    # Those in blocks have the number of a block in their names.
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and re.search(r"\.\d+\.", n)]
    some = rng.sample(linear, rng.randint(1, len(linear)))
    config = LoraConfig(r=2, target_modules=rng.choice(["all-linear", linear, some]), init_lora_weights=False)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in adapted.parameters():
        parameter.data = parameter.data.to(dtype)
    return adapted.get_base_model()


def mini_batches(case: Case, model: PreTrainedModel) -> list[Batch]:
    """Rows of random lengths, padded as the case says; some tokens are no target."""
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(case.number)
    rng = Random(case.number)
    vocabulary = max(4, min(config.vocab_size, model.get_input_embeddings().weight.shape[0]))
    pad = config.pad_token_id if isinstance(config.pad_token_id, int) and config.pad_token_id >= 0 else 0
    batches: list[Batch] = []
    for num_rows in case.rows:
        ids, mask = _rows(case.padding, num_rows, rng.randint(2, rng.choice([10, 10, 20])), rng)
        tokens = torch.randint(3, vocabulary, ids.shape, generator=generator)
        batch = {"input_ids": tokens.masked_fill(mask == 0, pad), "attention_mask": mask}
        if model.config.is_encoder_decoder:
            target = torch.randint(3, vocabulary, (num_rows, rng.randint(1, 8)), generator=generator)
            for row in range(num_rows):
                target[row, rng.randint(1, target.shape[1]) :] = IGNORED_LABEL
            batch["labels"] = target
            if case.extras:
                batch["decoder_attention_mask"] = (target != IGNORED_LABEL).long()
        else:
            batch["labels"] = tokens.masked_fill(mask == 0, IGNORED_LABEL)
            if rng.random() < 0.3:  # prompts are no targets
                last = int(mask[0].nonzero().max())
                batch["labels"][:, : rng.randint(1, last)] = IGNORED_LABEL
            if case.extras and "position_ids" in inspect.signature(model.forward).parameters:
                batch["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
        if case.padding == "none" and not case.extras and rng.random() < 0.5:
            del batch["attention_mask"]
        batches.append(batch)
    return batches


def _rows(padding: str, num_rows: int, length: int, rng: Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of 0 and the mask, (N, T)."""
    mask = torch.ones(num_rows, length, dtype=torch.long)
    for row in range(num_rows):
        left = rng.randint(0, length - 1) if padding in ("left", "both") else 0
        right = rng.randint(0, length - 1 - left) if padding in ("right", "both") else 0
        mask[row, :left] = 0
        mask[row, length - right :] = 0
    mask[0, length // 2 - 1 : length // 2 + 1] = 1  # at least two tokens, next to each other
    first, last = mask[0].argmax(), length - 1 - mask[0].flip(0).argmax()
    mask[0, first : last + 1] = 1
    return torch.zeros_like(mask), mask


def _micro_batches(case: Case, batches: Sequence[Batch]) -> list[Batch]:
    return [rows for batch in batches for rows in split_rows(batch, case.num_micro_batches)]


def _expected(case: Case, model: PreTrainedModel, batches: Sequence[Batch], adapter: Adapter) -> Step:
    """The plain model's step over the same micro-batches; where rows are packed, over each row alone."""
    if case.packing:
        rows = []
        for batch in batches:
            for document in documents_of(batch, adapter.target_keys):
                rows.append({name: tensor[None] for name, tensor in document.items() if name != "position_ids"})
        return plain_run(model, rows, case.label_smoothing)
    if case.length_bucketing:
        parts = [part for batch in batches for part in split_tokens(batch, case.num_micro_batches, adapter)]
    else:
        parts = _micro_batches(case, batches)
    return plain_run(model, [adapter.prepare(part) for part in parts], case.label_smoothing)


def _pipeline(case: Case, model: PreTrainedModel, folder: Path) -> Pipeline:
    num_layers = len(adapter_for(model.config, model.dtype, model.config._attn_implementation, type(model)).layers)
    num_stages = min(case.num_stages, num_layers)
    options: dict[str, Any] = {"partition": "count"} | case.mode_options
    schedule = options.pop("schedule", case.schedule)
    recompute: Any = case.recompute if isinstance(case.recompute, str) else list(case.recompute[:num_stages])
    recompute = options.pop("recompute", recompute)
    if "teacher" in case.modes:
        other = replace(case, number=case.number + 1, lora=False)
        options["teacher"] = plain_model(_configuration(other), model.dtype, other)
        options["loss"] = DistillationLoss(cross_entropy_share=0.3)
    if case.cut is not None:
        cuts = sorted(Random(case.cut).sample(range(1, num_layers), num_stages - 1))
        options["partition"] = [b - a for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True)]
    if schedule == "table":
        number = case.num_micro_batches * len(case.rows)
        table = random_table(num_stages, number, Random(case.number), recomputes=recompute == "stage")
        schedule, recompute = str(folder / "random.txt"), "stage"
        Path(schedule).write_text(table.text(), encoding="utf-8")
    return Pipeline(
        model,
        num_stages,
        case.num_micro_batches,
        schedule,
        recompute,
        label_smoothing=case.label_smoothing,
        length_bucketing=case.length_bucketing,
        packing=case.packing,
        accumulation=len(case.rows),
        sequence_chunks=case.sequence_chunks,
        chunk_taper=case.chunk_taper,
        **options,
    )


def _step(pipe: Pipeline, batches: Sequence[Batch]) -> Step:
    pipe.zero_grad()
    pipe.step = 0
    loss = float(pipe.train_step(list(batches)))
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    return Step(loss, gradients, pipe.adapter.dtype)
