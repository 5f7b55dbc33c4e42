"""The arguments of `PipelineGRPOTrainer`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hf_gpipe.errors import UserError, check_choice, check_count, check_number
from hf_gpipe.planner.workload import PlanInputs
from hf_gpipe.settings.losses import GRPOSection
from hf_gpipe.tasks.grpo.loss import AGGREGATIONS, GRPOLoss
from hf_gpipe.tasks.grpo.server import RolloutServer
from hf_gpipe.trainers.arguments import LanguageModelArguments, TaskArguments
from hf_gpipe.training.arguments import argument

#: Options of generation that other arguments decide.
_DECIDED = ("max_new_tokens", "max_length", "max_tokens", "num_return_sequences", "n", "eos_token_id", "pad_token_id")


@dataclass
class PipelineGRPOConfig(LanguageModelArguments, TaskArguments):
    """Arguments of `PipelineGRPOTrainer`: those of `PipelineTrainer`, and TRL's GRPOConfig's by their names.

    `per_device_train_batch_size` is the prompts of a mini-batch, each with `num_generations` completions.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    learning_rate: float = argument(1e-6, "Peak learning rate.")
    max_length: int | None = argument(None, "Tokens of a prompt at most; None: any number.")
    top_p: float = argument(1.0, "Share of the probability that is sampled from.")
    top_k: int = argument(0, "Number of tokens that are sampled from; 0: all.")
    min_p: float | None = argument(
        None, "Least probability that is sampled from, as a share of the largest; None: there is none."
    )
    repetition_penalty: float = argument(1.0, "By which logits of tokens are divided that are in the text already.")
    generation_kwargs: dict[str, Any] | str | None = argument(
        None, "More options of `generate`, or entries of the requests to rollout_server; None: no more."
    )
    chat_template_kwargs: dict[str, Any] | str | None = argument(
        None, "Variables for the chat templates of the model and of reward models; None: no variables."
    )
    beta: float = argument(
        GRPOSection().beta,
        "Weight of the divergence from the reference: the model without its new PEFT adapters, or without such "
        "adapters a copy of the weights before the training, which the planner does not count.",
    )
    scale_rewards: str = argument(
        GRPOSection().scale_rewards,
        "The rewards by whose standard deviation advantages are divided: group (True): of a prompt's completions; "
        "batch: of the whole mini-batch; none (False): advantages are not divided.",
    )
    log_completions: bool = argument(
        False,
        "Whether each log of the training writes the completions since the last one to output_dir/completions, and "
        "prints them.",
    )
    num_completions_to_print: int | None = argument(None, "How many of them are printed; None: all.")
    num_generations_eval: int | None = argument(None, "Completions of each prompt in evaluation; None: as in training.")
    reward_weights: list[float] | None = argument(None, "Factors of the reward functions; None: 1 each.")
    multi_objective_aggregation: str = argument(
        "sum_then_normalize", "sum_then_normalize, or normalize_then_sum: the rewards of each function by themselves."
    )
    mask_truncated_completions: bool = argument(False, "Whether completions that have no end are left out of the loss.")
    rollout_server: str | None = argument(
        None, "URL of a server of OpenAI's completions API, such as http://host:8000; None: the pipeline generates."
    )
    rollout_server_model: str | None = argument(None, "The model's name there; None: the only one that it lists.")
    rollout_timeout: float = argument(600.0, "Seconds that the server may take for one answer.")
    rollout_weights_dir: str | None = argument(None, "Where its weights are written; None: output_dir/rollout_weights.")
    rollout_sync_steps: int = argument(1, "Steps from one set of weights of the server to the next.")
    rollout_reload: str | dict[str, dict[str, Any]] = argument(
        "vllm", "How the server is told of new weights: vllm, sglang, or the bodies of requests by their paths."
    )
    _loss, section = GRPOLoss, GRPOSection
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *LanguageModelArguments._VALID_DICT_FIELDS,
        *("generation_kwargs", "chat_template_kwargs"),
    ]

    def check(self) -> None:
        scaling: Any = self.scale_rewards
        if isinstance(scaling, bool):
            self.scale_rewards = "group" if scaling else "none"
        super().check()
        check_count("top_k", self.top_k, 0)
        if self.min_p is not None:
            check_number("min_p", self.min_p, most=1)
        check_number("repetition_penalty", self.repetition_penalty, is_above=True)
        if self.num_completions_to_print is not None:
            check_count("num_completions_to_print", self.num_completions_to_print, 1)
        options = self.generation_kwargs if isinstance(self.generation_kwargs, dict) else {}
        if decided := [name for name in _DECIDED if name in options]:
            raise UserError(
                f"generation_kwargs has {decided[0]!r}, which the trainer decides; leave it out, and set "
                "num_generations, max_completion_length or the tokenizer's eos_token"
            )
        check_count("rollout_sync_steps", self.rollout_sync_steps, 1)
        if self.num_generations_eval is not None:
            check_count("num_generations_eval", self.num_generations_eval, 1)
        check_number("top_p", self.top_p, most=1, is_above=True)
        for weight in self.reward_weights or ():
            check_number("reward_weights", weight, -math.inf)
        for name in ("generation_config", "generation_max_length", "generation_num_beams", "predict_with_generate"):
            if getattr(self, name):
                raise UserError(
                    f"{name}: completions are sampled from the distribution that the loss reads; leave it out, and set "
                    "max_completion_length, temperature, top_p, top_k or generation_kwargs"
                )
        check_choice("multi_objective_aggregation", self.multi_objective_aggregation, AGGREGATIONS)
        self._check_server()

    @property
    def sampling(self) -> dict[str, Any]:
        """How completions are sampled, as options of `generate` by name."""
        return {
            **{name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")},
            **({} if self.min_p is None else {"min_p": self.min_p}),
            **(self.generation_kwargs if isinstance(self.generation_kwargs, dict) else {}),
        }

    def _check_server(self) -> None:
        if self.rollout_server is None:
            for name, field in self.__dataclass_fields__.items():
                if name.startswith("rollout_") and (value := getattr(self, name)) != field.default:
                    raise UserError(f"{name}={value!r}: there is no rollout_server; give its URL, or leave this out")
            return
        self.make_server()
        if self.rollout_sync_steps > 1 and self.temperature != 1 and (self.top_p < 1 or self.top_k):
            raise UserError(
                f"rollout_sync_steps={self.rollout_sync_steps} takes the server's log-probabilities, and none are of "
                f"temperature={self.temperature!r} without top_p={self.top_p!r} and top_k={self.top_k!r}; leave out "
                "the temperature or the other two, or leave rollout_sync_steps out"
            )

    def make_server(self) -> RolloutServer:
        """The server that makes the rollouts. Raises UserError for a URL, or requests, that cannot be."""
        assert self.rollout_server is not None
        return RolloutServer(
            self.rollout_server, self.rollout_server_model, self.rollout_timeout, reload=self.rollout_reload
        )

    def planned(self, inputs: PlanInputs) -> PlanInputs:
        # A server's time is not the pipeline's.
        own = self.max_completion_length if self.rollout_server is None else 0
        inputs = inputs.for_rollouts(own, self.num_iterations)
        # It gives the probabilities before the updates then.
        return replace(inputs, forwards=0) if self.rollout_sync_steps > 1 else inputs

    @property
    def of_example(self) -> tuple[int, int]:
        return self.num_generations, self.max_completion_length
