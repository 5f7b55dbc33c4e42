"""GRPO: the loss and every gradient of a plain loop for any cut, TRL's formulas, and a reward that rises."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.nn import functional as F
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, TrainerCallback

from examples.grpo import main, share_of_letter, tokenizer
from hf_gpipe import Pipeline, PipelineGRPOConfig, PipelineGRPOTrainer
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.settings.losses import CLIPPED
from hf_gpipe.tasks.grpo.answers import checked_by
from hf_gpipe.tasks.grpo.loss import GRPOLoss, advantages_of, deviations
from hf_gpipe.tasks.grpo.prompts import PromptExamples, prompted_of
from hf_gpipe.tasks.grpo.rewards import Rewards
from tests.gloo import run_gloo
from tests.oracle import VOCABULARY, Result, assert_same, run_pipeline, tiny_config
from tests.training.toy import TWO_STAGES, Recorder, trained_alike, weights


def rollouts(count: int = 7) -> dict[str, torch.Tensor]:
    """Rows of a prompt and a completion of unequal lengths, padded on the right."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (count, 11), generator=generator)
    prompts = torch.randint(1, 4, (count, 1), generator=generator)
    ends = prompts + torch.randint(1, 8, (count, 1), generator=generator)
    place = torch.arange(11)
    mask = place < ends
    log_probs = -4 + torch.rand(count, 11, generator=generator, dtype=torch.float64)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask | (place < prompts), -100),
        "advantages": torch.randn(count, generator=generator),
        "old_logps": log_probs,
        "ref_token_logps": log_probs.flip(0) + 0.3,
    }


def logits_of(model: Any, batch: dict[str, torch.Tensor], temperature: float = 1.0) -> torch.Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits / temperature


def token_log_probs(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return -F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def plain_loss(model: Any, batch: dict[str, torch.Tensor], loss: GRPOLoss) -> torch.Tensor:
    """TRL's formulas."""
    options = loss.options
    logits = logits_of(model, batch, loss.temperature)  # once, because norms round its gradient to float32
    log_probs = token_log_probs(logits, batch)
    mask = F.pad((batch["labels"][:, 1:] != -100).double(), (0, 1))
    advantages = batch["advantages"].double()[:, None]
    log_ratio = log_probs - batch.get("old_logps", log_probs.detach())
    if loss.importance_sampling_level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    ratio = torch.exp(log_ratio)
    high = loss.epsilon if loss.epsilon_high is None else loss.epsilon_high
    clipped = torch.clamp(ratio, 1 - loss.epsilon, 1 + high)
    ratio = ratio if loss.delta is None else torch.clamp(ratio, max=loss.delta)
    losses = -torch.min(ratio * advantages, clipped * advantages)
    positive = advantages > 0
    if loss.loss_type == "cispo":
        losses = -torch.clamp(ratio, max=high).detach() * advantages * log_probs
    elif loss.loss_type == "sapo":
        speed = torch.where(positive, options.sapo_temperature_pos, options.sapo_temperature_neg).double()
        losses = -4 * torch.sigmoid(speed * (ratio - 1)) / speed * advantages
    elif loss.loss_type == "vespo":
        of_row = torch.exp((log_ratio * mask).sum(-1, keepdim=True)).detach()
        power = torch.where(advantages >= 0, options.vespo_k_pos, options.vespo_k_neg).double()
        decay = torch.where(advantages >= 0, options.vespo_lambda_pos, options.vespo_lambda_neg).double()
        losses = -(of_row**power) * torch.exp(decay * (1 - of_row)) * advantages * log_probs
    if options.off_policy_mask_threshold is not None:
        drift = -(log_ratio.detach() * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
        losses = losses * ((advantages >= 0) | (drift <= options.off_policy_mask_threshold))
    if loss.beta:
        difference = batch["ref_token_logps"] - log_probs
        divergence = torch.exp(difference) - difference - 1
        corrected = divergence * torch.exp(log_ratio) if options.use_bias_correction_kl else divergence
        losses = losses + loss.beta * corrected
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    return averaged(losses, mask, loss) - options.entropy_coef * (entropies * mask).sum() / mask.sum()


def averaged(losses: torch.Tensor, mask: torch.Tensor, loss: GRPOLoss) -> torch.Tensor:
    if loss.loss_type == "luspo":
        return (losses * mask).sum(-1).mean()
    if loss.loss_type in ("grpo", "sapo"):
        return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if loss.loss_type == "dr_grpo":
        return (losses * mask).sum() / (len(mask) * loss.max_completion_length)
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)


CASES = (
    (GRPOLoss(0.04, "grpo", epsilon_high=0.28), True),
    (GRPOLoss(0.0, "dapo", temperature=0.7), False),
    (GRPOLoss(0.1, "dr_grpo", 9, delta=1.5), True),
    (GRPOLoss(0.1, "bnpo", importance_sampling_level="sequence", temperature=1.3, use_bias_correction_kl=False), True),
    (GRPOLoss(0.0, "luspo", importance_sampling_level="sequence", entropy_coef=0.3), True),
    (GRPOLoss(0.1, "cispo", epsilon_high=0.9, temperature=1.2, entropy_coef=-0.2), True),
    (GRPOLoss(0.0, "sapo", sapo_temperature_pos=0.8, off_policy_mask_threshold=0.2), True),
    (GRPOLoss(0.1, "vespo", vespo_k_pos=1.5, vespo_lambda_neg=1.0), True),
)


@pytest.mark.parametrize(("loss", "has_old"), CASES)
def test_loss_and_every_gradient(loss: GRPOLoss, has_old: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config("llama")).double().train()
    batch = rollouts()
    if not has_old:
        del batch["old_logps"]
    value = plain_loss(model, batch, loss)
    value.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected, draw = Result(float(value.detach()), gradients), random.Random(str(loss))
    for num_stages, count in ((1, 1), (2, 3), (3, 5)):
        schedule, recompute = draw.choice((("gpipe", "stage"), ("1f1b", "block"), ("zb_h1", "none")))
        options: Any = {"loss": loss, "length_bucketing": draw.random() < 0.5}
        pipe = Pipeline(copy.deepcopy(model), num_stages, count, schedule, recompute, **options)
        pipe.zero_grad()
        assert_same(run_pipeline(pipe, batch), expected)
        assert pipe.eval_step(batch).loss == pytest.approx(expected.loss, rel=1e-9)
        counts = dict(zip(loss.metrics, loss.take(is_training=False)[1].tolist(), strict=True))
        num_tokens = int((batch["labels"] != -100).sum())
        num_ratios = 7 if loss.importance_sampling_level == "sequence" else num_tokens
        has_clips, coefficient = loss.loss_type in CLIPPED, loss.options.entropy_coef
        assert counts == {
            "kl": num_tokens * bool(loss.beta),
            **{f"clip_ratio/{name}_mean": num_ratios * has_clips for name in ("low", "high", "region")},
            "cispo_clip_ratio": num_ratios * (loss.loss_type == "cispo"),
            "vespo/phi_seq_mean": 7 * (loss.loss_type == "vespo"),
            "policy_loss": 7 * bool(coefficient),
            "entropy": num_tokens * bool(coefficient),
        }
        found = pipe.token_log_probs(batch)
        expected_log_probs = token_log_probs(logits_of(model, batch, loss.temperature), batch).detach()
        torch.testing.assert_close(found, expected_log_probs, rtol=0, atol=1e-10)


def test_advantages() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    groups = rewards.view(-1, 3)
    centred = groups - groups.mean(1, keepdim=True)
    torch.testing.assert_close(advantages_of(rewards, 3), (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten())
    torch.testing.assert_close(advantages_of(rewards, 3, "batch"), (centred / (rewards.std() + 1e-4)).flatten())
    torch.testing.assert_close(advantages_of(rewards, 3, "none"), centred.flatten())
    missing = advantages_of(torch.tensor([1.0, torch.nan, 0.0, 1.0, 1.0, 1.0]), 3)
    assert missing[1] == 0
    assert missing[0] == -missing[2] > 0
    assert missing[3:].tolist() == [0, 0, 0]
    rewards[1] = torch.nan
    spread = [torch.tensor([1.0, 1.0]).std(), torch.tensor([1.0, 2.0, 2.0]).std()]
    torch.testing.assert_close(deviations(rewards.view(-1, 3)).flatten(), torch.stack(spread))
    assert deviations(torch.full((1, 3), torch.nan)) == 0


class StopAt(TrainerCallback):
    """Ends a training after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class ByStep(Recorder):
    """TRL's logs of the updates of a step as one: the loss of the last update, and the means of its metrics."""

    def __init__(self, updates_per_step: int) -> None:
        super().__init__()
        self.updates_per_step = updates_per_step
        self.pending: list[dict[str, Any]] = []

    def _note(self, name: str, logs: dict[str, Any] | None) -> None:
        if logs is not None and "loss" in logs:
            self.pending.append(logs)
            if len(self.pending) < self.updates_per_step:
                return
            # What is known of a rollout is logged by its first update alone.
            names = {name for one in self.pending for name, value in one.items() if isinstance(value, float)}
            found = {name: [one[name] for one in self.pending if name in one] for name in names}
            logs = {name: sum(values) / len(values) for name, values in found.items()} | {"loss": logs["loss"]}
            self.pending.clear()
        super()._note(name, logs)


LETTERS = [{"prompt": f"{letter}:" + "a" * number, "letter": letter} for number, letter in enumerate("abcd")]


def made_trainer(
    folder: Path, model: Any, reward: Any = None, stop_at: int | None = None, **values: Any
) -> tuple[PipelineGRPOTrainer, Recorder]:
    given = {"train_dataset": LETTERS, "processing_class": tokenizer(), "peft_config": None, "rollout_func": None}
    given |= {"eval_dataset": None, "reward_processing_classes": None}
    given |= {name: values.pop(name) for name in given if name in values}
    common: dict[str, Any] = {
        **TWO_STAGES,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "num_generations": 3,
        "max_completion_length": 4,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
    }
    recorder = Recorder()
    made = PipelineGRPOTrainer(
        model,
        share_of_letter if reward is None else reward,
        PipelineGRPOConfig(output_dir=str(folder), **common | values),
        callbacks=[recorder, *([StopAt(stop_at)] if stop_at else [])],
        **given,
    )
    return made, recorder


def trained(*given: Any, resumes: bool | None = None, **values: Any) -> tuple[Any, list[dict[str, Any]]]:
    made, recorder = made_trainer(*given, **values)
    made.train(resume_from_checkpoint=resumes)
    return made, [one for one in recorder.logs if "loss" in one]


def small() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config("llama", eos_token_id=0, bos_token_id=None)).double()


def test_completions_and_updates_do_not_depend_on_the_stages(tmp_path: Path) -> None:
    """With several updates a step, a group per prompt, and a reference without its adapters."""
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], lora_alpha=64, init_lora_weights=False)
    values: dict[str, Any] = {"num_iterations": 2, "beta": 0.05, "loss_type": "grpo", "peft_config": lora}
    calls: list[Any] = []

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any) -> Any:
        calls.append((prompts, completion_ids))
        assert [prompt[0] for prompt in prompts] == columns["letter"]
        assert columns["trainer_state"].max_steps == 2
        assert all(len(ids) <= 4 and 0 not in ids[:-1] for ids in completion_ids)
        return [None if number == 1 else float(ids[0]) for number, ids in enumerate(completion_ids)]

    one, logs = trained(tmp_path / "1", small(), reward, num_stages=1, num_micro_batches=1, **values)
    three, others = trained(tmp_path / "3", small(), reward, num_stages=3, num_micro_batches=5, **values)
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]
    assert [prompt[:2] for prompt in calls[0][0][:3]] == [calls[0][0][0][:2]] * 3
    for name in ("loss", "reward", "reward_std", "kl", "clip_ratio/region_mean", "completions/mean_length"):
        assert [log[name] for log in logs] == pytest.approx([log[name] for log in others], rel=1e-6), name
    rewards = torch.tensor([float(ids[0]) for number, ids in enumerate(calls[0][1]) if number != 1])
    assert logs[0]["reward_std"] == pytest.approx(float(rewards.std()))
    assert logs[0]["kl"] > 0
    found = weights(three)
    for name, parameter in weights(one).items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-9)


def test_a_resumed_run_generates_the_same_completions(tmp_path: Path) -> None:
    values: dict[str, Any] = {"num_iterations": 2, "loss_type": "dr_grpo", "save_steps": 2}
    whole, logs = trained(tmp_path / "whole", small(), max_steps=4, **values)
    trained(tmp_path / "parts", small(), max_steps=4, save_strategy="steps", stop_at=2, **values)
    resumed, others = trained(tmp_path / "parts", small(), max_steps=4, resumes=True, **values)
    assert [log["reward"] for log in logs[2:]] == [log["reward"] for log in others]
    found = weights(resumed)
    for name, parameter in weights(whole).items():
        torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-12)


def test_prompts_of_messages_get_completions_of_messages(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }}:{% endfor %}"
    rows = [{"prompt": [{"role": "user", "content": letter}]} for letter in "ab"]
    assert PromptExamples(rows, words)[1]["prompt_ids"] == words("b:")["input_ids"]
    seen: list[Any] = []

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        seen.append((prompts[0], completions[0]))
        return [float(number) for number in range(len(completions))]

    trained(tmp_path, small(), reward, max_steps=1, train_dataset=rows, processing_class=words)
    ((prompt, completion),) = seen
    assert prompt[0]["role"] == "user"
    assert [message["role"] for message in completion] == ["assistant"]


def test_the_reward_rises() -> None:
    """By the example."""
    rewards = main(30)
    assert rewards[-1] > rewards[0] + 0.3


@pytest.mark.parametrize(
    "values",
    [
        {"loss_type": "grpo", "beta": 0.05, "reward_weights": [0.5, 2.0]},
        {"loss_type": "dapo", "reward_weights": [1.0, 3.0], "multi_objective_aggregation": "normalize_then_sum"},
        {"loss_type": "dapo", "temperature": 0.8, "mask_truncated_completions": True},
        {"loss_type": "dr_grpo", "scale_rewards": "batch", "num_iterations": 2, "epsilon": 0.01, "delta": 1.05},
        {"loss_type": "bnpo", "scale_rewards": False, "num_iterations": 2, "epsilon": 1e-3}
        | {"importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": False},
        {"loss_type": "bnpo", "gradient_accumulation_steps": 2},
        {"loss_type": "cispo", "num_iterations": 2, "epsilon_high": 1.0, "beta": 0.2, "peft": False},
        {"loss_type": "sapo", "num_iterations": 2, "off_policy_mask_threshold": 1e-3, "peft": False},
        {"loss_type": "vespo", "num_iterations": 2, "vespo_k_pos": 1.5, "entropy_coef": 0.05},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2, "epsilon": 1e-3}
        | {"beta": 0.1},
        {"loss_type": "grpo", "beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 3, "peft": False},
    ],
)
def test_thirty_steps_of_trl(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our completions as TRL's rollouts, because each samples by random numbers of its own.

    TRL counts each update of the same completions as a step, where the last one's loss is logged here. It logs 0 as
    the mean of no tokens, which is not logged here.
    """
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    has_adapters = values.pop("peft", True)
    common: dict[str, Any] = values | {
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "num_generations": 3,
        "max_completion_length": 4,
        "save_strategy": "no",
        "bf16": False,
    }
    # TRL deals the rows of several mini-batches out at random.
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda rows: rows)
    rollouts: list[list[list[int]]] = []

    def noted(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        rollouts.append(completion_ids)
        return reward(completion_ids)

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [ids[0] / 10 + len(ids) for ids in completion_ids]

    def second(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        return [None if len(ids) == 4 else ids[-1] / 7 for ids in completion_ids]

    others = [second] if "reward_weights" in values else []

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        made = [ids for _ in range(len(prompts) // 6) for ids in rollouts.pop(0)]
        return {"prompt_ids": tokenizer()(prompts)["input_ids"], "completion_ids": made, "logprobs": None}

    updates, loss_type = values.get("num_iterations", 1), values["loss_type"]
    model, recorder = small().float(), ByStep(updates)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    if not has_adapters:  # TRL reads its reference from where the model was read
        model.save_pretrained(tmp_path / "model")
        model = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    shared: dict[str, Any] = {"peft_config": lora if has_adapters else None, "processing_class": tokenizer()}
    made, ours = made_trainer(
        *(tmp_path, copy.deepcopy(model), [noted, *others]),
        **common | shared | {"num_micro_batches": 2, "train_sampling_strategy": "sequential", "max_steps": 30},
    )
    options: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "shuffle_dataset": False}
    theirs = GRPOTrainer(
        model,
        [reward, *others],
        GRPOConfig(
            output_dir=str(tmp_path / "trl"),
            per_device_train_batch_size=6,
            gradient_checkpointing=False,
            max_steps=30 * updates,
            logging_steps=1,
            **common | options,
        ),
        train_dataset=Dataset.from_list(LETTERS),
        rollout_func=roll_out,
        callbacks=[recorder],
        **shared,
    )
    names = [
        "reward",
        *(() if "gradient_accumulation_steps" in values else ("reward_std",)),
        "frac_reward_zero_std",
        "completions/mean_length",
        "completions/clipped_ratio",
    ]
    names += [f"rewards/second/{of}" for of in ("mean", "std") if others]
    clips = loss_type in CLIPPED and "mask_truncated_completions" not in values
    names += [f"clip_ratio/{n}_mean" for n in ("low", "high", "region")] if clips else []
    names += [
        name for name, own in (("cispo_clip_ratio", "cispo"), ("vespo/phi_seq_mean", "vespo")) if loss_type == own
    ]
    assert (made.ref_model is None) == (has_adapters or "beta" not in values)
    names += ["policy_loss", "entropy", "entropy_coef"] if "entropy_coef" in values else []
    trained_alike(made, theirs, (ours, recorder), [*names, "kl"] if "beta" in values else names)
    has_clipped = sum(log.get("clip_ratio/region_mean", 0.0) for log in ours.logs) > 0
    assert has_clipped == ("num_iterations" in values and clips)


def test_what_is_not_supported(tmp_path: Path) -> None:
    for options, message in (
        ({"loss_type": "gspo"}, "loss_type: found 'gspo' .*expected 'grpo', 'bnpo', 'dr_grpo', 'dapo'"),
        ({"loss_type": "sapo", "epsilon": 0.1}, "epsilon is 0.1 .* and loss_type is sapo, which does not use it"),
        ({"loss_type": "cispo", "delta": 2.0}, "delta is 2.0 .* and loss_type is cispo, which does not use it"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos is 2.0 .* and loss_type is dapo, which does not use"),
        ({"min_p": 1.5}, "min_p=1.5: expected a finite number of at least 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: expected a finite number above 0"),
        ({"generation_kwargs": {"eos_token_id": 1}}, "generation_kwargs has 'eos_token_id', which the trainer decides"),
        ({"num_completions_to_print": 0}, "num_completions_to_print=0: expected a whole number of at least 1"),
        ({"ref_model_sync_steps": 2}, "ref_model_sync_steps is 2 .* and sync_ref_model is false"),
        ({"steps_per_generation": 2}, "no argument 'steps_per_generation': each step trains on completions of its own"),
        (
            {"entropy_target": 0.2},
            "no argument 'entropy_target': it is for use_adaptive_entropy, which is not supported",
        ),
        ({"top_entropy_quantile": 0.2}, "no argument 'top_entropy_quantile': it needs the entropies of all tokens"),
        ({"num_generations": 1}, "num_generations: found 1 .*expected a whole number of at least 2"),
        ({"max_completion_length": 0}, "max_completion_length: found 0 .*expected a whole number of at least 1"),
        ({"top_k": -1}, "top_k=-1: expected a whole number of at least 0"),
        ({"top_p": 0.0}, "top_p=0.0: expected a finite number above 0 and at most 1"),
        ({"beta": math.inf}, "beta: found inf .*expected a number of at least 0"),
        ({"epsilon": math.nan}, "epsilon: found nan .*expected a number of at least 0"),
        ({"epsilon_high": -5.0}, "epsilon_high: found -5.0 .*expected a number of at least 0"),
        ({"delta": -1.0}, "delta=-1.0: expected a finite number above 0"),
        ({"reward_weights": [math.nan]}, "reward_weights=nan: expected a finite number"),
        ({"generation_config": GenerationConfig()}, "generation_config: completions are sampled from the distribution"),
        ({"predict_with_generate": True}, "predict_with_generate: completions are sampled from the distribution"),
        ({"generation_num_beams": 2}, "generation_num_beams: completions are sampled from the distribution"),
        ({"scale_rewards": "all"}, "scale_rewards: found 'all'"),
        ({"temperature": 0.0}, "temperature: found 0.0 .*expected a number above 0"),
        ({"multi_objective_aggregation": "mean"}, "multi_objective_aggregation='mean' is not supported; choose one of"),
        ({"num_generations_eval": 0}, "num_generations_eval=0: expected a whole number of at least 1"),
        ({"rollout_sync_steps": 0}, "rollout_sync_steps=0: expected a whole number of at least 1"),
        ({"rollout_server": "localhost:8000"}, "rollout_server='localhost:8000': expected a URL such as"),
        ({"rollout_server": "http://a:b"}, "rollout_server='http://a:b': expected a URL such as"),
        (
            {"rollout_server": "http://a", "rollout_timeout": 0.0},
            "rollout_timeout=0.0: expected a finite number above 0",
        ),
        ({"rollout_server": "http://[::1"}, r"rollout_server='http://\[::1': expected a URL such as"),
        ({"rollout_sync_steps": 2}, "rollout_sync_steps=2: there is no rollout_server; give its URL"),
        (
            {"rollout_server": "http://a", "rollout_sync_steps": 2, "temperature": 0.5, "top_k": 3},
            "rollout_sync_steps=2 takes the server's log-probabilities, and none are of temperature=0.5 without top_p",
        ),
        ({"rollout_server": "http://a", "rollout_reload": {"/a": {"b": {1}}}}, "a body is no JSON"),
        ({"rollout_server": "http://a", "rollout_reload": {"/a": {"b": "{model}"}}}, "which is rollout_server_model"),
        (
            {"rollout_server": "http://a", "rollout_timeout": 1e300},
            r"rollout_timeout=1e\+300: expected a finite number",
        ),
        ({"rollout_server": "http://a", "rollout_reload": "tgi"}, "rollout_reload='tgi': expected one of vllm, sglang"),
    ):
        with pytest.raises(UserError, match=message):
            PipelineGRPOConfig(output_dir=str(tmp_path), **options).check()  # type: ignore[arg-type]
    for options in ({"beta": 0.0}, {"beta": 0.1, "peft_config": LoraConfig(target_modules=["q_proj"])}):
        with pytest.raises(UserError, match=r"sync_ref_model=True: beta is .*, so no copy could follow the model"):
            trained(tmp_path, small(), sync_ref_model=True, **options)
    with pytest.raises(DataError, match="row 0: 'prompt' is None; it must be text, or a list of messages"):
        PromptExamples([{"text": "a"}], tokenizer())
    with pytest.raises(DataError, match="row 1: the prompt has 3 tokens, and max_length is 2"):
        PromptExamples([{"prompt": "a:"}, {"prompt": "a:a"}], tokenizer(), max_length=2)


def test_completions_do_not_depend_on_the_generation_config(tmp_path: Path) -> None:
    """Nor on its settings that a pipeline refuses: the loss reads the model's own distribution."""
    seen: list[Any] = []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[None]:
        seen.append(completion_ids)
        return [None] * len(completion_ids)

    plain, other = small(), small()
    asked = {"repetition_penalty": 50.0, "top_k": 1, "min_p": 0.9, "typical_p": 0.1, "no_repeat_ngram_size": 1}
    asked |= {"suppress_tokens": list(range(1, 40)), "bad_words_ids": [[40], [41]], "min_new_tokens": 4}
    asked |= {"num_beams": 2, "num_return_sequences": 2, "guidance_scale": 2.0, "stop_strings": ["a"], "max_length": 2}
    other.generation_config = GenerationConfig(do_sample=True, **asked)
    for number, model in enumerate((plain, other)):
        _, (log,) = trained(tmp_path / str(number), model, reward, max_steps=1)
        # Without any reward there is none to log, and the weights stay.
        assert log["reward_std"] == log["loss"] == 0
        assert "reward" not in log
    assert seen[0] == seen[1]
    assert len({token for ids in seen[0] for token in ids}) > 8


def test_rewards_that_are_none(tmp_path: Path) -> None:
    """One message names the function, what it gave and what is expected."""

    def fails(**columns: Any) -> list[float]:
        raise KeyError("boom")

    given: tuple[tuple[Any, str], ...] = (
        (
            lambda **columns: [1.0],
            "<lambda> gave 1 rewards; expected 6 finite numbers or None, one for each completion",
        ),
        (lambda **columns: None, "<lambda> gave None, a NoneType; expected 6 finite numbers"),
        (lambda **columns: ["1"] * 6, r"<lambda> gave \['1', .*, a list; expected 6 finite numbers"),
        (lambda **columns: [1e39] * 6, r"<lambda> gave 1e\+39 for completion 0; expected 6 finite numbers"),
        (lambda **columns: [None] * 5 + [math.nan], "<lambda> gave nan for completion 5; expected 6 finite numbers"),
        (lambda **columns: [10**400] * 6, "<lambda> gave .*; expected 6 finite numbers"),
        (fails, "the reward function fails failed: KeyError: 'boom'"),
    )
    made, _ = trained(tmp_path, small(), max_steps=1)
    for function, message in given:
        made._rewards = Rewards(function)
        with pytest.raises(UserError, match=message) as caught:
            made.train()
    assert isinstance(caught.value.__cause__, KeyError)
    for functions, message in (
        ([], "reward_funcs is empty"),
        (1, "reward_funcs has 1, a int; give functions, or models that classify rows"),
        ([share_of_letter, torch.nn.ReLU()], r"reward_funcs: ReLU has None labels and is no reward; give a model of"),
        ("/no/such/model", "reward_funcs: '/no/such/model' cannot be read as a model of rewards"),
    ):
        with pytest.raises(UserError, match=message):
            made_trainer(tmp_path, small(), functions)


def test_rows_that_no_step_could_use(tmp_path: Path) -> None:
    """They are found before the first step; a column that some rows lack is None there."""
    for rows, message in (
        ([], "the dataset has no rows"),
        ([{"prompt_ids": [1], "row": 0}], "row 0: 'prompt' is None"),
        ([{"prompt": "a:"}, {"prompt": "a:", "completions": "b"}], "the dataset has the column 'completions'"),
    ):
        with pytest.raises(DataError, match=message):
            trained(tmp_path, small(), train_dataset=rows)
    config = GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    message = "max_completion_length=9: the longest prompt has 5 tokens, and the model has positions for 12"
    with pytest.raises(UserError, match=message):
        trained(tmp_path, GPT2LMHeadModel(config), max_completion_length=9)
    seen: list[Any] = []

    def reward(prompts: list[str], letter: list[str | None], **columns: Any) -> list[float]:
        seen.extend(zip(prompts, letter, strict=True))
        return [1.0] * len(prompts)

    rows = [{"prompt": "a:"}, {"prompt": "bbb:", "letter": "b"}]
    trained(tmp_path, GPT2LMHeadModel(config), reward, train_dataset=rows, max_completion_length=8, max_steps=1)
    assert set(seen) == {("a:", None), ("bbb:", "b")}


def test_entries_of_other_shapes() -> None:
    """They are found before the step, and not spread over the positions."""
    model, batch = small(), rollouts(4)
    pipe = Pipeline(model, 1, 2, loss=GRPOLoss(0.1))
    for name, value, message in (
        ("advantages", None, r"the entry 'advantages' of a mini-batch is None: the loss reads \[4\]"),
        ("advantages", torch.zeros(4, 1), r"'advantages' of a mini-batch is \[4, 1\]: the loss reads \[4\] beside"),
        ("old_logps", torch.zeros(4, 1), r"'old_logps' of a mini-batch is \[4, 1\]: the loss reads \[4, 11\]"),
        ("ref_token_logps", None, r"'ref_token_logps' of a mini-batch is None: the loss reads \[4, 11\]"),
    ):
        others = {key: tensor for key, tensor in batch.items() if key != name}
        for step in (pipe.train_step, pipe.eval_step):
            with pytest.raises(DataError, match=message):
                step(others if value is None else others | {name: value})


def _length(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(ids[0]) - len(ids) for ids in completion_ids]


def _logs_of_a_run(folder: str, values: dict[str, Any]) -> tuple[list[tuple[float, ...]], dict[str, torch.Tensor]]:
    common: dict[str, Any] = {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "save_steps": 1}
    common |= {"loss_type": "grpo", "train_sampling_strategy": "group_by_length", "num_micro_batches": 4}
    made, logs = trained(Path(folder), small(), _length, **common | values)
    names = ("loss", "grad_norm", "reward", "clip_ratio/region_mean")
    made._rollout_func = _rows_of_threes
    metrics = made.evaluate(LETTERS)
    evaluated = tuple(metrics[f"eval_{name}"] for name in ("loss", "reward", "reward_std", "completions/mean_length"))
    return [*(tuple(log[name] for name in names) for log in logs), evaluated], weights(made)


def _rows_of_threes(prompts: list[str], trainer: Any) -> dict[str, Any]:
    completions = [[3 + number % 3] * (1 + number % 4) for number in range(len(prompts))]
    return {"prompt_ids": tokenizer()(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}


def _replicas_that_go_on_as_stages(folder: str) -> Any:
    values: dict[str, Any] = {"num_stages": 1, "replicas": 2, "zero": 1, "save_strategy": "steps", "stop_at": 1}
    first, _ = _logs_of_a_run(folder, values)
    second, found = _logs_of_a_run(folder, {"resumes": True})
    return first[:-1] + second, found


def test_two_processes(tmp_path: Path) -> None:
    expected, plain = _logs_of_a_run(str(tmp_path / "one"), {"num_stages": 1})
    assert len(expected) == 3
    for logs, found in run_gloo(_replicas_that_go_on_as_stages, 2, str(tmp_path / "two")):
        torch.testing.assert_close(torch.tensor(logs), torch.tensor(expected), rtol=1e-6, atol=1e-9)
        for name, parameter in plain.items():
            torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-9)


def test_checkable_rewards() -> None:
    for name, expected in (("exact", [1, 0, 0]), ("contains", [1, 1, 0]), ("characters", [0, 0, 0.25])):
        assert checked_by(name)(completions=[" 42 ", "is 42", "1"], answer=["42", "42", "1  2"]) == expected
    assert checked_by("characters")(completions=[[{"role": "assistant", "content": "abx"}]], answer=["abcd"]) == [0.5]
    assert prompted_of("row 1", {"prompt": "a", "answer": "b", "other": 1}) == {"prompt": "a", "answer": "b"}
    with pytest.raises(DataError, match="row 1: 'answer' is None"):
        prompted_of("row 1", {"prompt": "a"})


def test_reward_functions_that_await_and_log(tmp_path: Path) -> None:
    """Async functions run beside each other, and what functions log is in the logs and in a file of each log."""
    import asyncio

    import pyarrow.parquet

    turns: list[str] = []

    async def first(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        turns.append("first")
        await asyncio.sleep(0.01)
        turns.append("first is done")
        return [float(ids[0]) for ids in completion_ids]

    class Second:
        __name__ = "second"

        async def __call__(self, completions: list[str], log_extra: Any, log_metric: Any, **columns: Any) -> Any:
            turns.append("second")
            log_extra("lengths", [len(text) for text in completions])
            log_metric("seconds", 2.0)
            return [None for _ in completions]

    values: dict[str, Any] = {"log_completions": True, "num_completions_to_print": 2, "logging_steps": 2}
    _, (log,) = trained(tmp_path, small(), [first, Second()], **values)
    assert turns == ["first", "second", "first is done"] * 2
    assert log["seconds"] == 2
    table = pyarrow.parquet.read_table(tmp_path / "completions" / "completions_00002.parquet").to_pydict()
    assert [*table] == ["step", "prompt", "completion", "first", "second", "lengths", "advantage"]
    assert len(table["step"]) == 12
    assert table["lengths"] == [*map(len, table["completion"])]
    assert sum(table["first"][:6]) / 6 + sum(table["first"][6:]) / 6 == pytest.approx(2 * log["reward"])
    assert all(math.isnan(value) for value in table["second"])

    def wrong(completions: list[str], log_extra: Any, **columns: Any) -> list[float]:
        log_extra("lengths", [1])
        return [1.0] * len(completions)

    with pytest.raises(UserError, match=r"log_extra\('lengths', ...\) got 1 values for 6 completions"):
        trained(tmp_path, small(), wrong, **values)


def test_a_completion_without_rewards_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def none(completions: list[str], **columns: Any) -> list[None]:
        return [None] * len(completions)

    trained(tmp_path, small(), none)
    assert caplog.text.count("All reward functions returned None for the following kwargs:\n{'") == 1
    with pytest.raises(UserError, match="No reward source provided: reward_funcs is None"):
        PipelineGRPOTrainer(small())


def test_more_options_of_generation(tmp_path: Path) -> None:
    """They are those of `generate`: with its one largest token the completions are the most likely ones."""
    seen: list[Any] = []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[None]:
        seen.append(completion_ids)
        return [None] * len(completion_ids)

    likely: dict[str, Any] = {"generation_kwargs": {"do_sample": False}}
    for values in ({"min_p": 1.0}, likely, likely | {"repetition_penalty": 1e6}):
        trained(tmp_path, small(), reward, max_steps=1, **values)
    assert seen[0] == seen[1]
    assert seen[0][0] == seen[0][1] == seen[0][2]
    assert all(len({*ids}) == len(ids) for ids in seen[2])


def test_variables_of_the_chat_template(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{{ mark }}{% endfor %}"
    rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": letter}]} for letter in "ab"]
    rows[1]["chat_template_kwargs"] = {"mark": "c"}
    given = {"train_dataset": rows, "processing_class": words, "chat_template_kwargs": {"mark": ":"}}
    made, _ = made_trainer(tmp_path, small(), **given)
    assert [row["prompt_ids"] for row in made.train_dataset] == [words(text)["input_ids"] for text in ("a:", "bc")]


def test_a_mean_over_each_mini_batch(tmp_path: Path) -> None:
    """bnpo of several mini-batches is the mean of their losses, whatever their numbers of tokens are."""
    loss, model = GRPOLoss(0.0, "bnpo"), small()
    parts = [{name: tensor[rows] for name, tensor in rollouts().items()} for rows in (slice(0, 4), slice(4, 7))]
    made, _ = made_trainer(tmp_path, model, loss_type="bnpo")
    made._rolled_out = lambda batch, *given, **named: dict(batch)
    group = made.prepared(parts)
    pipe = Pipeline(copy.deepcopy(model), 2, 2, loss=loss)
    means = [float(plain_loss(model, part, loss).detach()) for part in parts]
    assert sum(pipe.eval_step(part).loss for part in group) == pytest.approx(sum(means) / 2)
