"""`PipelineGRPOTrainer`: TRL's GRPOTrainer, over a pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.adapters.modules.dropout import key, mix
from hf_gpipe.checkpoint.peft import CONFIG_NAME as ADAPTER_CONFIG_NAME
from hf_gpipe.checkpoint.save import written_whole
from hf_gpipe.data.collate import PairCollator, tokens_of
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.libraries.transformers import CONFIG_NAME
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.tasks.grpo.completion_log import CompletionLog
from hf_gpipe.tasks.grpo.config import PipelineGRPOConfig
from hf_gpipe.tasks.grpo.loss import GRPOLoss, advantages_of, advantages_of_each, deviations, summed
from hf_gpipe.tasks.grpo.prompts import PromptExamples
from hf_gpipe.tasks.grpo.rewards import GIVEN, RewardFunction, Rewards
from hf_gpipe.tasks.grpo.rollouts import RolloutFunction, Rollouts, rollouts_of
from hf_gpipe.trainers.reference import kept_reference, model_with
from hf_gpipe.trainers.trainer import TaskTrainer
from hf_gpipe.training.generating import completions_of
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.loop import TrainingLoop

logger = transformers.logging.get_logger(__name__)

RewardSource = RewardFunction | nn.Module | str

#: The losses that are sums over tokens, of which those of long rows are larger.
_SUMS_OF_TOKENS = ("bnpo", "dr_grpo", "dapo", "cispo")


class PipelineGRPOTrainer(TaskTrainer):
    """Trains on rewards of its own completions by pipeline parallelism, with the interface of TRL's GRPOTrainer.

    Each step makes `num_generations` completions of every prompt of the mini-batch, by the pipeline itself, a server or
    a function, asks for their rewards, and updates. Every process makes the same trainer and calls the same methods;
    only the main process reads data, calls reward functions and asks a server.

    Args:
        model: a decoder-only model as for `PipelineTrainer`; or a Pipeline made with `args.make_loss()` as its loss.
        reward_funcs: a `RewardFunction`, a model that classifies rows into one label, or its path; or several, whose
            weighted rewards are added up. Models are in the main process.
        args: the arguments; None: all defaults.
        train_dataset: map-style: rows that `PromptExamples` takes.
        eval_dataset: the same, or a dict of several by name, whose rewards `evaluate` gives.
        processing_class: the tokenizer; None: the tokenizer of the Hub id or directory that the model comes from.
        reward_processing_classes: the tokenizers of reward models, one for each of `reward_funcs`; None: their own.
        callbacks, optimizers: as for `PipelineTrainer`.
        quantization_config, peft_config: as for `Pipeline`.
        rollout_func: (prompts, trainer) -> {"prompt_ids", "completion_ids", "logprobs"} in place of generation, as in
            TRL. The main process calls it, with each prompt as often as it has completions. Other entries go to the
            reward functions. With "logprobs", those of the completions' tokens, the loss takes the ratio to them.

    Raises:
        UserError: an argument that is not supported, by its name.
    """

    _arguments, examples = PipelineGRPOConfig, PromptExamples
    args: PipelineGRPOConfig

    def __init__(
        self,
        model: Pipeline | ModelSource,
        reward_funcs: RewardSource | Sequence[RewardSource] | None = None,
        args: PipelineGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        rollout_func: RolloutFunction | None = None,
    ) -> None:
        variables: Any = args.chat_template_kwargs if isinstance(args, PipelineGRPOConfig) else None
        self._rewards = Rewards(reward_funcs, reward_processing_classes, variables)
        self._rollout_func = rollout_func
        #: The metrics of each mini-batch's completions since the last log, in training (True) and evaluation (False).
        self._noted: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        #: The step at which the server's weights were written; None: not yet.
        self._served_step: int | None = None
        self._evaluated_examples: Any = None
        self._num_evaluated = 0
        super().__init__(
            *(model, args, None, train_dataset, eval_dataset, processing_class, None, callbacks),
            *(optimizers, quantization_config, peft_config),
        )
        args = self.args
        self._server = None if args.rollout_server is None else args.make_server()
        if self._server is not None and rollout_func is not None:
            raise UserError("rollout_func: rollout_server is given too; leave one of them out")
        if self._server is not None:
            self.world.from_main(self._check_served_folder)
        weights = args.reward_weights or [1.0] * len(self._rewards)
        if len(weights) != len(self._rewards):
            raise UserError(f"reward_weights={weights!r}: expected one for each of {len(self._rewards)} functions")
        self._reward_weights = torch.tensor(weights)
        self._completion_log = CompletionLog(
            self._output_dir / "completions" if args.log_completions else None, args.num_completions_to_print
        )
        has_copy = bool(args.beta) and not self.pipe.has_new_adapters
        if args.sync_ref_model and not has_copy:
            raise UserError(
                f"sync_ref_model=True: beta is {args.beta!r}, or the reference is the model without its new adapters, "
                "so no copy could follow the model; leave it out, or train all weights with beta above 0"
            )
        why = "beta above 0 without new adapters needs it"
        self._kept = kept_reference(self, why) if has_copy else None
        if args.importance_sampling_level == "sequence" and args.loss_type in _SUMS_OF_TOKENS and self.world.is_main:
            logger.warning(
                f"loss_type={args.loss_type!r} with importance_sampling_level='sequence' weights each sequence by its "
                "completion length, for it is a sum over tokens that all have the ratio of their row; GSPO has "
                "loss_type='grpo'"
            )
        self.world.from_main(lambda: self._rewards.load(self.world.device), takes_long=True)
        self.world.from_main(self._check_data)

    @property
    def reward_processing_classes(self) -> list[Any]:
        """The tokenizer of each reward model, and None of each function."""
        return self._rewards.tokenizers

    @property
    def ref_model(self) -> Any:
        """A copy of the reference, where weights are kept for it, as of the other trainers with a reference; or None.

        Every process asks for it.
        """
        return None if self._kept is None else model_with(self._kept, self.model)

    def _options_of_examples(self, dataset: Any, name: str | None) -> dict[str, Any]:
        return {"chat_template_kwargs": self.args.chat_template_kwargs}

    def _check_data(self) -> None:
        """Raise UserError for prompts that are too long, or whose columns have names of other arguments."""
        if self.args.mask_truncated_completions and getattr(self._tokenizer, "eos_token_id", None) is None:
            raise UserError(
                "mask_truncated_completions: the tokenizer has no eos_token, so that no completion has an end; leave "
                "it out, or name the token"
            )
        given = self.eval_dataset
        for dataset in (self.train_dataset, *(given.values() if isinstance(given, Mapping) else (given,))):
            if dataset is not None:
                self._check_examples(dataset)

    def _streamed(self, rows: Any, name: str | None = None, *, is_training: bool) -> Any:
        if is_training:
            raise DataError("prompts are drawn by number: give a map-style dataset, such as list(...) of a stream")
        return super()._streamed(rows, name, is_training=is_training)

    def _check_examples(self, dataset: PromptExamples) -> None:
        if taken := [name for name in GIVEN if name in dataset.row_columns]:
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

    @property
    def _served_folder(self) -> Path:
        return Path(self.args.rollout_weights_dir or self._output_dir / "rollout_weights")

    def _check_served_folder(self) -> None:
        """Raise UserError where new weights in the server's folder would replace something else."""
        folder, model = self._served_folder, self.pipe.adapter.given_config.name_or_path
        problem = ""
        for name, path in (("output_dir", self._output_dir), ("the model", Path(model) if model else None)):
            if path is not None and path.exists() and path.resolve().is_relative_to(folder.resolve()):
                problem = f"{name} is in it"
        if folder.exists() and not folder.is_dir():
            problem = "it is no folder"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        if names and not {CONFIG_NAME, ADAPTER_CONFIG_NAME}.intersection(names):
            problem = "it has files, and none of them is the configuration of a model"
        if problem:
            raise UserError(
                f"rollout_weights_dir is {str(folder)!r}: {problem}, and new weights replace the whole folder; give "
                "one of its own"
            )

    def _loop(self, *args: Any, **options: Any) -> TrainingLoop:
        self._served_step = None  # the weights may be others than they were at that step
        return super()._loop(*args, **options)

    def _completed(self, dataset: Any) -> Any:
        self._served_step = None
        self.world.from_main(lambda: None if dataset is None else self._check_examples(dataset))
        self._evaluated_examples, self._num_evaluated = dataset, 0
        return dataset

    def _take_pipeline(self) -> None:
        super()._take_pipeline()
        pipe = self.pipe
        if pipe.runs_windows:
            raise UserError(
                f"schedule {pipe.config.schedule!r}: completions are those of the newest weights, and a window has "
                "several steps; use a synchronous schedule, such as 1f1b"
            )

    # ------------------------------------------------------------------ rollouts

    @property
    def updates_per_step(self) -> int:
        return self.args.num_iterations

    def prepared(self, group: Sequence[Batch], *, is_training: bool = True) -> Sequence[Batch]:
        first, count, purpose, examples = 0, self.args.num_generations, "rollouts", self.train_dataset
        if not is_training:
            first, self._num_evaluated = self._num_evaluated, self._num_evaluated + len(group)
            count, purpose = self.args.num_generations_eval or count, "rollouts of an evaluation"
            examples = self._evaluated_examples
        made = [
            self._rolled_out(batch, examples, count, (number, key(purpose)), is_training=is_training)
            for number, batch in enumerate(group, start=first)
        ]
        if self.args.loss_type == "bnpo" and len(made) > 1:  # a mean over the tokens of each, then over all of them
            for batch in made:
                num_tokens = int((batch["labels"] != IGNORED_LABEL).sum().clamp(min=1))
                batch["num_tokens"] = torch.full((len(batch["labels"]),), float(num_tokens * len(made)))
        return made

    def _rolled_out(
        self, batch: Batch, examples: Any, count: int, place: tuple[int, int], *, is_training: bool
    ) -> dict[str, torch.Tensor]:
        """A mini-batch of rows from one of prompts of some examples; every process calls it and gets the same."""
        args, loss = self.args, self.pipe.loss
        assert isinstance(loss, GRPOLoss)
        end = self.world.from_main(lambda: None if self._tokenizer is None else self._tokenizer.eos_token_id)
        # As everything else, they depend on the seed and the step alone.
        seed = mix(args.seed, self.pipe.step, *place)
        with self.job.during("generating completions"):
            rollouts = self._rollouts(batch, examples, count, end, seed, is_training=is_training)
        completions = rollouts.completions
        given: dict[str, Any] = {}

        def rewarded() -> tuple[list[list[float]], dict[str, float]]:
            given.update(self._columns(batch, examples, count, rollouts))
            return self._rewards(given).tolist(), self._completion_log.take_metrics()

        values, logged = self.world.from_main(rewarded, takes_long=True)
        rewards = torch.tensor(values)
        prompts = [prompt for prompt in tokens_of(batch) for _ in range(count)]
        made = PairCollator(end or 0).of_answers([*zip(prompts, completions, strict=True)])
        if args.mask_truncated_completions:
            made["labels"][torch.tensor([own[-1] != end for own in completions])] = IGNORED_LABEL
        total = summed(rewards, self._reward_weights)
        self._note_rollouts(rewards, total.view(-1, count), completions, end, logged, is_training=is_training)
        made["advantages"] = (
            advantages_of(total, count, args.scale_rewards)
            if args.multi_objective_aggregation == "sum_then_normalize"
            else advantages_of_each(rewards, self._reward_weights, count)
        )
        if is_training:
            of_each = dict(zip(self._rewards.names, rewards.t().tolist(), strict=True))
            advantages = made["advantages"].tolist()
            self.world.from_main(lambda: self._completion_log.add(given, of_each, advantages))
        added = {}
        if rollouts.log_probs is not None:
            added["old_logps"] = rollouts.at_positions(made["labels"].shape, [*map(len, prompts)])
        elif is_training and args.num_iterations > 1:
            added["old_logps"] = self.pipe.token_log_probs(made)
        if loss.options.beta:
            with nullcontext() if self._kept is None else self._kept.in_place():
                added["ref_token_logps"] = self.pipe.token_log_probs(made, with_adapters=not self.pipe.has_new_adapters)
        return made | added

    def _rollouts(
        self, batch: Batch, examples: Any, count: int, end: int | None, seed: int, *, is_training: bool
    ) -> Rollouts:
        """`count` completions of each prompt of a mini-batch, the same in every process."""
        args, server, function = self.args, self._server, self._rollout_func
        if server is None and function is None:
            prompts = {name: tensor.repeat_interleave(count, 0) for name, tensor in batch.items()}
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                tokens = completions_of(
                    self.pipe, prompts, end, args.max_completion_length, **{"do_sample": True} | args.sampling
                )
            return Rollouts(tokens.tolist()).until(end)
        longest, vocabulary = args.max_completion_length, self.pipe.adapter.config.get_text_config().vocab_size
        if server is not None:
            self._serve_weights(is_training=is_training)

        def ask() -> Rollouts:
            if server is not None:
                is_stale = is_training and args.rollout_sync_steps > 1
                # Servers take a seed of 31 bits.
                whose = {"seed": seed % 2**31, "end": end, "vocabulary": vocabulary, "has_log_probs": is_stale}
                return server.complete(tokens_of(batch), count, longest, **whose, **args.sampling)
            assert function is not None
            prompts = [examples.rows[row]["prompt"] for row in batch["row"].tolist() for _ in range(count)]
            asked = [prompt for prompt in tokens_of(batch) for _ in range(count)]
            return rollouts_of(function, prompts, self, asked, longest, vocabulary)

        made: list[Rollouts] = []

        def completions() -> tuple[list[list[int]], list[list[float]] | None]:
            made.append(ask().until(end))
            return made[0].completions, made[0].log_probs

        # The columns stay where the reward functions are.
        shared = self.world.from_main(completions, takes_long=True)
        return Rollouts(*shared, made[0].columns if made else None)

    def _serve_weights(self, *, is_training: bool) -> None:
        """Write the weights for the server and tell it, where it is time; every process calls it."""
        step, served = self.pipe.step, self._served_step
        # An evaluation is of the newest ones.
        every = self.args.rollout_sync_steps * self.updates_per_step if is_training else 1
        if served is not None and step - served < every:
            return
        folder = self._served_folder
        with written_whole(folder, self.world) as temporary:
            self.pipe.weights.write_new(temporary, self._write_beside_model)
        server, are_adapters = self._server, self.pipe.adapter.peft is not None
        assert server is not None
        self.world.from_main(lambda: server.load(folder, are_adapters=are_adapters), takes_long=True)
        self._served_step = step

    def _columns(self, batch: Batch, examples: Any, count: int, rollouts: Rollouts) -> dict[str, Any]:
        """The arguments of reward functions for the completions of a mini-batch; the main process calls it."""
        assert self._tokenizer is not None, "the main process has the tokenizer"
        given = [examples.rows[row] for row in batch["row"].tolist() for _ in range(count)]
        texts: list[Any] = self._tokenizer.batch_decode(rollouts.completions, skip_special_tokens=True)
        prompts = [row["prompt"] for row in given]
        texts = [
            [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        columns = {name: [row.get(name) for row in given] for name in examples.row_columns}
        columns |= rollouts.columns or {}
        log = self._completion_log
        own = (prompts, texts, rollouts.completions, self.state, log.log_extra, log.log_metric)
        return columns | dict(zip(GIVEN, own, strict=True))

    # ------------------------------------------------------------------ metrics

    def _note_rollouts(
        self,
        rewards: torch.Tensor,
        groups: torch.Tensor,
        completions: list[list[int]],
        end: int | None,
        logged: Mapping[str, float],
        *,
        is_training: bool,
    ) -> None:
        lengths = torch.tensor([*map(len, completions)], dtype=torch.float64)
        is_clipped = [completion[-1] != end for completion in completions]
        metrics = {
            "reward": float(groups.nanmean()),
            "reward_std": float(deviations(groups.view(1, -1))),
            "frac_reward_zero_std": float((deviations(groups).abs() <= 1e-8).double().mean()),
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": sum(is_clipped) / len(is_clipped),
        }
        for name, own in zip(self._rewards.names, rewards.unbind(dim=1), strict=True):
            has_several = int((~own.isnan()).sum()) > 1
            std = float(deviations(own[None])) if has_several else math.nan
            metrics |= {f"rewards/{name}/mean": float(own.nanmean()), f"rewards/{name}/std": std}
        self._noted[is_training].append({**metrics, **logged})

    def metrics_of_loss(self, *, is_training: bool) -> dict[str, float]:
        metrics = super().metrics_of_loss(is_training=is_training)
        noted, self._noted[is_training] = self._noted[is_training], []
        for name in dict.fromkeys(name for step_metrics in noted for name in step_metrics):
            values = [value for one in noted if not math.isnan(value := one.get(name, math.nan))]
            if values:  # there is none without any reward
                metrics[name] = sum(values) / len(values)
        if is_training:
            self.world.from_main(lambda: self._completion_log.write(self.state.global_step))
            if self.args.entropy_coef:
                metrics["entropy_coef"] = self.args.entropy_coef
        return metrics
