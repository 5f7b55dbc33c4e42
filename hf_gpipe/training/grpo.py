"""`PipelineGRPOTrainer`: TRL's GRPOTrainer, over a pipeline whose own `generate` makes the rollouts."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, TrainerCallback

from hf_gpipe.adapters.dropout import key, mix
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.prompts import PromptCollator, PromptExamples
from hf_gpipe.data.tokenized import IGNORE_INDEX
from hf_gpipe.errors import DataError, UserError, check_count, check_number
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.planner.workload import Workload
from hf_gpipe.training.arguments import argument
from hf_gpipe.training.grpo_loss import SCALES, GRPOLoss, advantages_of, deviations
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.pairs import PairArguments, PairTrainer

RewardFunction = Callable[..., Sequence[float | None]]
"""(prompts=, completions=, completion_ids=, trainer_state=, and each other column of the rows) -> the reward of each
completion; None: it has none."""

#: What reward functions get beside the columns.
_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state")


@dataclass
class PipelineGRPOConfig(PairArguments):
    """Arguments of `PipelineGRPOTrainer`: those of `PipelineTrainer`, and TRL's GRPOConfig's by their names.

    `per_device_train_batch_size` is the prompts of a mini-batch, each with `num_generations` completions.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    learning_rate: float = argument(1e-6, "Peak learning rate.")
    max_length: int | None = argument(None, "Tokens of a prompt at most; None: any number.")
    disable_dropout: bool = argument(False, "Whether the model has no dropout in training.")
    num_generations: int = argument(8, "Completions of each prompt.")
    max_completion_length: int = argument(512, "Tokens of a completion at most.")
    temperature: float = argument(1.0, "Of sampling; the loss divides the logits by it too.")
    top_p: float = argument(1.0, "Share of the probability that is sampled from.")
    top_k: int = argument(0, "Number of tokens that are sampled from; 0: all.")
    beta: float = argument(0.0, "Weight of the divergence from the model without its new PEFT adapters.")
    num_iterations: int = argument(1, "Updates from the same completions; a step of the trainer has as many.")
    epsilon: float = argument(0.2, "Lower bound of the ratio of probabilities, 1 - epsilon.")
    epsilon_high: float | None = argument(None, "Upper bound, 1 + epsilon_high; None: epsilon.")
    delta: float | None = argument(None, "Largest ratio of the term that is not clipped; None: any.")
    importance_sampling_level: str = argument("token", "token, or sequence (GSPO).")
    loss_type: str = argument("dapo", "grpo, bnpo, dr_grpo or dapo.")
    scale_rewards: str = argument("group", "By whose standard deviation advantages are divided: group, batch or none.")
    reward_weights: list[float] | None = argument(None, "Factors of the reward functions; None: 1 each.")
    mask_truncated_completions: bool = argument(False, "Whether completions that have no end are left out of the loss.")

    def check(self) -> None:
        """Raise UserError for a value that a pipeline does not support."""
        super().check()
        for name, least in (("num_generations", 2), ("num_iterations", 1), ("top_k", 0)):
            check_count(name, getattr(self, name), least)
        check_number("top_p", self.top_p, most=1, is_above=True)
        for weight in self.reward_weights or ():
            check_number("reward_weights", weight, -math.inf)
        if self.generation_config is not None:
            raise UserError(
                "generation_config: completions are sampled from the distribution that the loss reads; leave it out, "
                "and set temperature, top_p or top_k"
            )
        if self.scale_rewards not in SCALES:
            raise UserError(f"scale_rewards={self.scale_rewards!r} is not supported; choose one of {', '.join(SCALES)}")
        if self.loss_type == "bnpo" and self.gradient_accumulation_steps > 1:
            raise UserError(
                "loss_type='bnpo': it is a mean over the tokens of each mini-batch, and several are accumulated; use "
                "dapo, the mean over all of them"
            )
        if self.eval_strategy != "no":
            raise UserError("eval_strategy: rewards of other prompts are not supported; leave it out")

    def make_loss(self) -> GRPOLoss:
        """The loss that these arguments ask for."""
        return GRPOLoss.of(self)


#: Every setting of `generate`, so that none of the model's generation_config changes the distribution of its tokens.
_NEUTRAL: dict[str, Any] = {
    **{name: None for name in vars(GenerationConfig()) if name[0] != "_" and name != "use_cache"},
    **{"num_beams": 1, "num_return_sequences": 1},
}


class PipelineGRPOTrainer(PairTrainer):
    """Trains on rewards of its own completions by pipeline parallelism, with the interface of TRL's GRPOTrainer.

    Each step generates `num_generations` completions of every prompt of the mini-batch by the pipeline itself, asks the
    reward functions, and updates. Every process makes the same trainer and calls the same methods; only the main
    process reads data and calls reward functions.

    Args:
        model: a decoder-only model as for `PipelineTrainer`; or a Pipeline made with `args.make_loss()` as its loss.
        reward_funcs: a `RewardFunction`, or several, whose rewards are added up.
        args: the arguments; None: all defaults.
        train_dataset: map-style: rows that `PromptExamples` takes.
        processing_class: the tokenizer; None: the model's own, where the model is a Hub id or directory.
        callbacks: as for `PipelineTrainer`.
        optimizers: as for `PipelineTrainer`.
        quantization_config: as for `Pipeline`.
        peft_config: as for `Pipeline`.

    Raises:
        UserError: an argument that is not supported, by its name.
    """

    _collated_columns = ("prompt_ids", "row")
    _arguments, _class_of_examples = PipelineGRPOConfig, PromptExamples
    args: PipelineGRPOConfig

    def __init__(
        self,
        model: Pipeline | ModelSource,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        args: PipelineGRPOConfig | None = None,
        train_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        self._reward_funcs = _functions(reward_funcs)
        #: Of the completions of each mini-batch since the last log: mean and deviation of rewards, and mean length.
        self._noted: list[tuple[float, float, float]] = []
        super().__init__(
            *(model, args, None, train_dataset, None, processing_class, None, callbacks),
            *(optimizers, quantization_config, peft_config),
        )
        weights = self.args.reward_weights
        if weights is not None and len(weights) != len(self._reward_funcs):
            raise UserError(f"reward_weights={weights!r}: expected one for each of {len(self._reward_funcs)} functions")
        self.world.from_reader(self._check_prompts)

    def _check_prompts(self) -> None:
        """Raise UserError for prompts that are too long, or whose columns have names of other arguments."""
        if (dataset := self.train_dataset) is None:
            return
        if taken := [name for name in _GIVEN if name in dataset.columns]:
            raise DataError(
                f"the dataset has the column {taken[0]!r}, which reward functions get from the trainer; rename it"
            )
        longest, length = max(dataset.lengths), self.args.max_completion_length
        most = self.pipe.adapter.num_positions.get("decoder")
        if most is not None and longest + length > most:
            raise UserError(
                f"max_completion_length={length}: the longest prompt has {longest} tokens, and the model has positions "
                f"for {most} tokens of a prompt with its completion; use a smaller one, or shorter prompts"
            )

    def _evaluated(self, dataset: Any, generation: Mapping[str, Any], required: str) -> Iterable[Batch] | None:
        raise UserError(
            "evaluate and predict: rewards of other prompts are not supported; call Pipeline.generate of trainer.pipe "
            "with the prompts, and then your reward functions"
        )

    def _check_pipeline(self, pipe: Pipeline) -> None:
        if pipe.is_asynchronous:
            raise UserError(
                f"schedule {pipe.config.schedule!r}: completions are those of the newest weights, and a window has "
                "several steps; use a synchronous schedule, such as 1f1b"
            )
        assert isinstance(pipe.loss, GRPOLoss)
        if pipe.loss.beta and not pipe.has_new_adapters:
            raise UserError(
                f"beta={pipe.loss.beta!r}: the reference is the model without its new PEFT adapters, and there are "
                "none; give peft_config, or beta=0"
            )

    def _workload(self, dataset: Any, args: Any) -> Workload | None:
        if dataset is None:
            return None
        longest = max(dataset.lengths) + args.max_completion_length
        return Workload(args.num_generations * args.per_device_train_batch_size, longest, longest)

    def _collator(self, pipe: Pipeline) -> PairCollator:
        return PromptCollator(self._padding)

    # ------------------------------------------------------------------ rollouts

    @property
    def updates_per_step(self) -> int:
        return self.args.num_iterations

    def prepared(self, group: Sequence[Batch]) -> Sequence[Batch]:
        return [self._rolled_out(batch, number) for number, batch in enumerate(group)]

    def _rolled_out(self, batch: Batch, number: int) -> Batch:
        """A mini-batch of rows from one of prompts; every process calls it and gets the same."""
        args, loss = self.args, self.pipe.loss
        assert isinstance(loss, GRPOLoss)
        prompts, masks = (
            batch[name].repeat_interleave(args.num_generations, 0) for name in ("input_ids", "attention_mask")
        )
        end = self.world.from_reader(lambda: None if self._tokenizer is None else self._tokenizer.eos_token_id)
        padding = PairCollator(0 if end is None else end).pad_token_id
        with torch.random.fork_rng(), self.job.during("generating completions"):
            # As everything else, they depend on the seed and the step alone.
            torch.manual_seed(mix(args.seed, self.pipe.step, number, key("rollouts")))
            generated = self.pipe.generate(
                **_NEUTRAL
                | {
                    "input_ids": prompts,
                    "attention_mask": masks,
                    "max_new_tokens": args.max_completion_length,
                    "do_sample": True,
                    "temperature": args.temperature,
                    "top_p": args.top_p,
                    "top_k": args.top_k,
                    "eos_token_id": end,
                    "pad_token_id": padding,
                }
            )
        completions = [_until(row, end) for row in generated[:, prompts.shape[1] :].tolist()]
        rewards = torch.tensor(
            self.world.from_reader(lambda: self._rewards(batch["row"].tolist(), completions), takes_long=True)
        )
        self._note_rollouts(rewards, completions)
        rows = []
        for ids, mask, completion in zip(prompts, masks, completions, strict=True):
            prompt = ids[mask.bool()].tolist()
            is_left_out = args.mask_truncated_completions and completion[-1] != end
            labels = [IGNORE_INDEX] * len(completion) if is_left_out else completion
            rows.append({"input_ids": prompt + completion, "labels": [IGNORE_INDEX] * len(prompt) + labels})
        made: dict[str, torch.Tensor] = PairCollator(padding)(rows)
        made["advantages"] = advantages_of(rewards, args.num_generations, args.scale_rewards)
        added = {}
        if args.num_iterations > 1:
            added["old_logps"] = self.pipe.token_log_probs(made)
        if loss.beta:
            added["ref_token_logps"] = self.pipe.token_log_probs(made, with_adapters=False)
        return made | added

    def _rewards(self, rows: list[int], completions: list[list[int]]) -> list[float]:
        """The weighted sum of the functions' rewards of each completion, NaN where none gives one."""
        count, tokenizer = self.args.num_generations, self._tokenizer
        assert tokenizer is not None, "the reader has the tokenizer"
        given = [self.train_dataset.rows[row] for row in rows for _ in range(count)]
        texts: list[Any] = tokenizer.batch_decode(completions, skip_special_tokens=True)
        prompts = [row["prompt"] for row in given]
        texts = [
            [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        columns = {name: [row.get(name) for row in given] for name in self.train_dataset.columns}
        columns |= dict(zip(_GIVEN, (prompts, texts, completions, self.state), strict=True))
        total = torch.full((len(given),), math.nan)
        for function, weight in zip(
            self._reward_funcs, self.args.reward_weights or [1.0] * len(self._reward_funcs), strict=True
        ):
            values = _values_of(function, columns)
            total = torch.where(values.isnan(), total, total.nan_to_num(nan=0.0) + weight * values)
        rewards: list[float] = total.tolist()
        return rewards

    def _note_rollouts(self, rewards: torch.Tensor, completions: list[list[int]]) -> None:
        mean_length = sum(map(len, completions)) / len(completions)
        self._noted.append((float(rewards.nanmean()), float(deviations(rewards[None])), mean_length))

    def _metrics_of_loss(self, *, is_training: bool) -> dict[str, float]:
        metrics = super()._metrics_of_loss(is_training=is_training)
        if not is_training or not self._noted:
            return metrics
        means = torch.tensor(self._noted).nanmean(dim=0).tolist()
        self._noted.clear()
        found = zip(("reward", "reward_std", "completions/mean_length"), means, strict=True)
        return metrics | {name: value for name, value in found if not math.isnan(value)}  # without any reward


def _functions(given: Any) -> list[RewardFunction]:
    """The reward functions. Raises UserError where there are none, or something else."""
    functions = list(given) if isinstance(given, list | tuple) else [given]
    for function in functions:
        if not callable(function) or isinstance(function, nn.Module):
            raise UserError(
                f"reward_funcs has {reprlib.repr(function)}, a {type(function).__name__}: reward models are not "
                "supported; give functions, which may call a model"
            )
    if not functions:
        raise UserError("reward_funcs is empty; give at least one function")
    return functions


def _values_of(function: RewardFunction, arguments: Mapping[str, Any]) -> torch.Tensor:
    """The rewards that a function gives (N,), NaN for None. Raises UserError where it gives others, or fails."""
    name, count = getattr(function, "__name__", None) or repr(function), len(arguments["completions"])
    try:
        found = function(**arguments)
    except Exception as error:
        raise UserError(f"the reward function {name} failed: {type(error).__name__}: {error}") from error
    expected = f"expected {count} finite numbers or None, one for each completion"
    try:
        values = torch.tensor([math.nan if value is None else _number(value) for value in found])
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"the reward function {name} gave {reprlib.repr(found)}, a {type(found).__name__}; {expected}"
        ) from None
    if len(values) != count or bool(values.isinf().any()):
        what = f"{len(values)} rewards" if len(values) != count else "an infinite reward"
        raise UserError(f"the reward function {name} gave {what}; {expected}")
    return values


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError  # float() would read digits
    return float(value)


def _until(tokens: list[int], end: int | None) -> list[int]:
    """The tokens up to the first `end`, with it."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens
