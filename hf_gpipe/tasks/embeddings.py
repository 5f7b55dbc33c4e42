"""Embeddings: texts that belong together, with the losses, datasets and files of sentence-transformers."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from tokenizers import normalizers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from hf_gpipe.adapters.embedders import as_embedder
from hf_gpipe.checkpoint.peft import base_of, has_adapters
from hf_gpipe.checkpoint.save import make_directory
from hf_gpipe.checkpoint.sentence_files import PROMPTS_FILE, SentenceFiles
from hf_gpipe.data.collate import tokens_of
from hf_gpipe.data.embedding_examples import EmbeddingCollator, EmbeddingExamples, NumberedCollator, embedded_of
from hf_gpipe.data.encoded import SeveralDatasets
from hf_gpipe.data.rows import Read
from hf_gpipe.errors import UserError, listed
from hf_gpipe.from_recipe.held_out import HeldOut, HeldOutReport
from hf_gpipe.from_recipe.tasks import Task
from hf_gpipe.job.calls import by_every_process
from hf_gpipe.libraries.transformers import source_of
from hf_gpipe.libraries.transformers_trainer import FIELDS_OF_JSON
from hf_gpipe.losses.embeddings import EmbeddingLoss, EmbeddingLosses
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe import Recipe
from hf_gpipe.settings.losses import EmbeddingsSection
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.section import Text, keys_of
from hf_gpipe.trainers.arguments import TaskArguments
from hf_gpipe.trainers.sentence_model import SentenceModel
from hf_gpipe.trainers.trainer import TaskTrainer, as_class, each
from hf_gpipe.training.arguments import argument
from hf_gpipe.training.pools import has_index
from hf_gpipe.training.predicting import shared_batches


class _Section(EmbeddingsSection):
    """The keys of a recipe, and what several datasets need."""

    prompts: dict[Text, Text | dict[Text, Text]] | str | None = None  # type: ignore[assignment]  # it is wider
    """Words that go before the texts of each column, such as {"anchor": "query: "}, or before all texts. Of several
    datasets: also of each dataset by its name, or of each of its columns; null: none."""

    multi_dataset_batch_sampler: Literal["proportional", "round_robin"] = "proportional"
    """How mini-batches of several training datasets follow each other, each with rows of one of them. proportional: all
    of all datasets, in random order; round_robin: in turn, until one dataset has no other."""


@dataclass
class PipelineEmbeddingConfig(TaskArguments):
    """Arguments of `PipelineEmbeddingTrainer`: those of `PipelineTrainer`, and of sentence-transformers' losses.

    `per_device_train_batch_size` is the examples of a mini-batch, of `texts` rows each.

    Raises:
        UserError: an argument that is not supported.
    """

    max_length: int | str | None = argument(  # type: ignore[assignment]  # a text until the model is known
        AUTO, "Tokens of a text at most; None: any number; auto: as files of sentence-transformers say, or 512."
    )
    train_sampling_strategy: str = argument("random", "random, sequential, group_by_length or no_duplicates.")
    _loss, section = EmbeddingLoss, _Section
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*FIELDS_OF_JSON, "prompts"]

    def check(self) -> None:
        if self.batch_sampler == "no_duplicates":
            if self.train_sampling_strategy not in ("random", "no_duplicates"):
                raise UserError(
                    f"batch_sampler is 'no_duplicates' and train_sampling_strategy {self.train_sampling_strategy!r}, "
                    "and rows have one order; leave one of them out"
                )
            self.train_sampling_strategy = "no_duplicates"
        super().check()


class PipelineEmbeddingTrainer(TaskTrainer):
    """Trains a model of embeddings by pipeline parallelism; the negatives are those of the whole mini-batch.

    Every process makes the same trainer and calls the same methods; only the main process reads data. The saved
    directory loads in sentence-transformers.

    Args:
        model: the Hub id or directory of an encoder (bert, xlm-roberta, ...) or a decoder-only model, whose head is
            left out, or of PEFT adapters; its configuration; a model in memory of AutoModel; or a Pipeline made with
            `args.make_loss()` as its loss.
        data_collator: rows to a mini-batch; None: `EmbeddingCollator`.
        train_dataset, eval_dataset: rows that `EmbeddingExamples` takes, or its examples; or a dict of several such
            datasets by name, such as a DatasetDict. Each mini-batch of the training has rows of one of them.
        loss: the loss, in place of the arguments' `loss_type` and its options, or a dict with one for each dataset's
            name. None: as the arguments say. Where a loss leaves them open, the model decides `pooling` and
            `normalizes`, and for "multiple_negatives" the rows decide `texts`.
        evaluator: an evaluator of sentence-transformers, or several, with or without an eval_dataset: a function of the
            model (`SentenceModel`), `output_path`, `epoch` and `steps` that returns metrics. Every process calls it.
        args, processing_class, compute_metrics, callbacks, optimizers, quantization_config, peft_config: as for
            `PipelineDPOTrainer`.

    Raises:
        UserError: what is not supported, by name.
    """

    _arguments, examples = PipelineEmbeddingConfig, EmbeddingExamples
    args: PipelineEmbeddingConfig
    #: The different losses of the datasets; empty until the rows are known.
    _losses: tuple[EmbeddingLoss, ...] = ()
    #: The keys of `prompts` that name a dataset, or a column of one; None: no dataset has a name.
    _used_prompts: set[str] | None = None
    #: The prefix of the metrics of evaluators in the evaluation under way; None: they have run.
    _prefix: str | None = None

    def __init__(
        self,
        *given: Any,
        loss: EmbeddingLoss | Mapping[str, EmbeddingLoss] | None = None,
        evaluator: Any = None,
        **options: Any,
    ) -> None:
        self._asked_loss = loss
        self.evaluators = evaluator if isinstance(evaluator, list | tuple) else [evaluator] if evaluator else []
        super().__init__(*given, **options)
        counts = self.world.gather_objects(len(self.evaluators))
        if min(counts) < max(counts):
            raise UserError(f"evaluator: the processes have {counts} of them; give the same in every process")

    @by_every_process
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generation: Any,
    ) -> dict[str, float]:
        """Loss and metrics as of `PipelineTrainer.evaluate`, and the metrics of the evaluators."""
        if not isinstance(eval_dataset, str):
            prepared: list[Any] = []
            self.world.from_main(lambda: prepared.append(each(eval_dataset, self._examples)), takes_long=True)
            eval_dataset = prepared[0] if prepared else None
        self._prefix = metric_key_prefix if self.evaluators else None
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if self.evaluators and not self.world.from_main(lambda: dataset is not None):
            self._check_surface()
            return self._end_evaluation({})
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **generation)

    def _end_evaluation(self, metrics: dict[str, float]) -> dict[str, float]:
        if (prefix := self._prefix) is not None:
            self._prefix = None
            with self.job.during("evaluating"):
                metrics |= {f"{prefix}_{name}": value for name, value in self._metrics_of_evaluators().items()}
        return super()._end_evaluation(metrics)

    def _metrics_of_evaluators(self) -> dict[str, float]:
        most = self.args.max_length if isinstance(self.args.max_length, int) else None
        model = SentenceModel(self.pipe, self._tokenizer, most, self._files.contents.get(PROMPTS_FILE, {}))
        place: dict[str, Any] = {"epoch": self.state.epoch, "steps": self.state.global_step, "output_path": None}
        if self.world.is_main:
            place["output_path"] = os.path.join(self.args.output_dir, "eval")
            make_directory(Path(place["output_path"]))
        metrics: dict[str, Any] = {}
        for evaluator in self.evaluators:
            found = evaluator(model, **place)
            metrics |= found if isinstance(found, Mapping) else {"evaluator": found}
        shared: dict[str, float] = self.world.from_main(lambda: {name: float(metrics[name]) for name in metrics})
        return shared

    @property
    def _has_own_rows(self) -> bool:
        is_own = type(self).evaluate is not PipelineEmbeddingTrainer.evaluate
        return bool(self.evaluators) or is_own or self.overrides("get_eval_dataloader")

    def _prepare_data(self, model: Any) -> None:
        self._check_asked()
        self._files, args = files_of(model), self.args
        is_ready = isinstance(model, Pipeline) and isinstance(model.loss, EmbeddingLoss)
        own = model.loss.options if is_ready else self._files
        if args.pooling == AUTO and own.pooling is not None:
            args.pooling = own.pooling
        if args.normalizes is None:
            args.normalizes = own.normalizes
        if args.max_length == AUTO:
            args.max_length = self._files.max_length or _MAX_LENGTH
        if args.prompts:
            self._files.check_prompts()
        if self._files.lowers_case:
            if self.processing_class is None:
                self.processing_class = self._tokenizer_beside(model)
            if self._tokenizer is not None:
                lower_case(self._tokenizer)
        super()._prepare_data(model)
        texts = self.world.from_main(self._texts_of_datasets)
        self._losses = tuple(dict.fromkeys(self._loss_of(name, number) for name, number in texts))
        self.world.from_main(self._number_datasets)
        if not isinstance(model, Pipeline):
            self._given_loss = self._loss

    # ------------------------------------------------------------------ several datasets and losses

    def _check_asked(self) -> None:
        """Raise UserError for a `loss` that cannot be used, or that the datasets do not fit."""
        if self._given_loss is not None:
            raise UserError("compute_loss_func is not supported; give loss, such as loss=EmbeddingLoss('cosine')")
        if (asked := self._asked_loss) is None:
            return
        for loss in asked.values() if isinstance(asked, Mapping) else [asked]:
            if not isinstance(loss, EmbeddingLoss):
                raise UserError(
                    f"loss: found a {type(loss).__name__}; give an EmbeddingLoss, such as EmbeddingLoss('cosine')"
                )
        for name, key in keys_of(type(EmbeddingLoss.options)).items():
            if (value := getattr(self.args, name)) != key.default:
                raise UserError(f"{name}={value!r} is an option of the loss, and loss is given; set it in the loss")

        def check_names() -> None:
            for given in (self.train_dataset, self.eval_dataset):
                each(given, lambda rows, name: None if rows is None else self._asked_for(name))

        # Before texts are tokenised, which takes long.
        self.world.from_main(check_names)

    def _texts_of_datasets(self) -> list[tuple[str | None, int | None]]:
        """The name of each dataset of the training and of the evaluation, and the number of its texts, if known."""
        if self._used_prompts is not None and (unused := self.args.prompts.keys() - self._used_prompts):
            raise UserError(f"prompts has {min(unused)!r}, which no dataset and no column is called; correct prompts")
        found: list[tuple[str | None, int | None]] = []
        for dataset in (self.train_dataset, self.eval_dataset):
            parts = dataset.datasets if isinstance(dataset, SeveralDatasets) else dataset
            each(parts, lambda rows, name: None if rows is None else found.append((name, _num_texts(rows))))
        return found

    def _loss_of(self, name: str | None, num_texts: int | None) -> EmbeddingLoss:
        """The loss of a dataset of this name, whose rows have so many texts, if that is known."""
        texts = {} if num_texts is None else {"texts": num_texts}
        asked = self._asked_for(name)
        return asked.decided(pooling=self.args.pooling, normalizes=self.args.normalizes, **texts)

    def _asked_for(self, name: str | None) -> EmbeddingLoss:
        """The loss that is given for a dataset of this name. Raises UserError where there is none."""
        if not isinstance(asked := self._asked_loss, Mapping):
            loss: EmbeddingLoss = self.args.make_loss() if asked is None else asked
            return loss
        if name is None or name not in asked:
            which = "a dataset has no name" if name is None else f"the dataset {name!r} has no loss"
            raise UserError(f"{which}, and loss is a dict of {listed(list(asked))}; give a dict of datasets of these")
        return asked[name]

    @property
    def _loss(self) -> EmbeddingLoss:
        if not self._losses:
            loss: EmbeddingLoss = super()._loss
            return loss
        return self._losses[0] if len(self._losses) == 1 else EmbeddingLosses(self._losses)

    def _several(self, datasets: Mapping[str, Any]) -> SeveralDatasets:
        return SeveralDatasets(datasets, in_turn=self.args.multi_dataset_batch_sampler == "round_robin")

    def _examples(self, dataset: Any, name: str | None = None, *, is_training: bool = False) -> Any:
        if not (is_training and isinstance(dataset, Mapping)):
            return self._numbered(super()._examples(dataset, name, is_training=is_training), name)
        if streams := [own for own, rows in dataset.items() if not has_index(rows)]:
            raise UserError(
                f"train_dataset[{streams[0]!r}] has no length, by which the datasets are drawn; give one that has rows "
                "by index"
            )
        return self._several(each(dataset, self._examples))

    def _number_datasets(self) -> None:
        if isinstance(self.train_dataset, SeveralDatasets):
            self.train_dataset = self._several(each(self.train_dataset.datasets, self._numbered))
        else:
            self.train_dataset = self._numbered(self.train_dataset, None)
        self.eval_dataset = each(self.eval_dataset, self._numbered)

    def _numbered(self, examples: Any, name: str | None) -> Any:
        """Examples that know the number of their loss, where there are several losses."""
        if len(self._losses) < 2 or examples is None:
            return examples
        if not isinstance(examples, EmbeddingExamples):
            raise UserError(
                f"a dataset is a {type(examples).__name__}, and there are several losses; give rows of texts, which "
                "become examples that know their loss"
            )
        if examples.loss_number is None or name is not None:
            loss = self._loss_of(name, _num_texts(examples))
            if loss not in self._losses:
                raise UserError(
                    f"a dataset with {_num_texts(examples)} texts needs the loss {loss}, and the trainer was made for "
                    f"{self._loss}; give it the dataset as eval_dataset"
                )
            examples = copy.copy(examples)
            examples.loss_number = self._losses.index(loss)
        return examples

    def _options_of_examples(self, dataset: Any, name: str | None) -> dict[str, Any]:
        prompts = self.args.prompts
        if not isinstance(prompts, Mapping):
            return {"prompts": prompts}
        nested = [own for own, prompt in prompts.items() if isinstance(prompt, Mapping)]
        if name is None:
            if nested:
                raise UserError(f"prompts are of datasets, such as {nested[0]!r}; give a dict of datasets by name")
            return {"prompts": prompts}
        # Of several datasets each has columns of its own.
        used = {name} if name in prompts else {*prompts} & {*next(iter(dataset), ())} - {*nested}
        self._used_prompts = (self._used_prompts or set()) | used
        return {"prompts": prompts[name] if name in prompts else {column: prompts[column] for column in used}}

    def _example(self, spec: ModelSpec) -> Any:
        found = super()._example(spec)
        rows = self._loss.rows_per_unit * self.args.per_device_train_batch_size
        return replace(found, rows=rows) if isinstance(found, Workload) else found

    def _source(self, model: Any) -> tuple[Any, dict[str, Any]]:
        return as_class(model, lambda config, is_saved: dict(as_embedder(config)))

    def _take_pipeline(self) -> None:
        own = self.data_collator
        if own is not None and len(self._losses) > 1 and not isinstance(own, NumberedCollator):
            self.data_collator = NumberedCollator([own] * len(self._losses))
        super()._take_pipeline()
        if (adapter := self.pipe.adapter).has_head:
            raise UserError(
                f"the model is a {type(adapter.reference).__name__}, which has a head; give its path, or a model of "
                "AutoModel"
            )

    def _collator(self) -> Any:
        of_each = [EmbeddingCollator(self._padding, loss.rows_per_unit, loss.needs_score) for loss in self._losses]
        return of_each[0] if len(of_each) == 1 else NumberedCollator(of_each)

    def _write_beside_model(self, folder: Path) -> None:
        super()._write_beside_model(folder)
        loss, width = self.pipe.loss, self.pipe.adapter.config.get_text_config().hidden_size
        assert isinstance(loss, EmbeddingLoss)
        how: dict[str, Any] = {"max_length": self.args.max_length, "normalizes": loss.options.normalizes}
        self._files.write(folder, width=width, pooling=loss.options.pooling, **how)


#: Tokens of a text at most, where nothing says it.
_MAX_LENGTH = 512


def _num_texts(examples: Any) -> int | None:
    """The number of texts of the first example; None: there is none, or the examples are a stream."""
    return len(examples[0]["text_lengths"]) if has_index(examples) and len(examples) else None


def files_of(model: Any) -> SentenceFiles:
    """The files of sentence-transformers beside a model: a path, a model or configuration read from one, or a Pipeline.

    Raises UserError for files of a model that is not supported.
    """
    if isinstance(model, Pipeline):
        model = model.adapter.reference
    if not isinstance(model, str | os.PathLike):
        model = source_of(model)
        model = model if os.path.isdir(model) else None  # an id may be another model's by now
    return SentenceFiles.of(base_of(model) if has_adapters(model) else model)


def lower_case(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer lowercase its texts first, as sentence-transformers does it. Raises UserError if it cannot."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise UserError("do_lower_case of sentence_bert_config.json needs a fast tokenizer; lowercase the texts")
    if "Lowercase" not in repr(backend.normalizer) and "lowercase=True" not in repr(backend.normalizer):
        others = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])


def evaluate_embeddings(pipe: Pipeline, held_out: HeldOut) -> HeldOutReport:
    """How cosines of embeddings agree with what belongs together; the rows are those of `EmbeddingExamples`.

    With scores it is Spearman's correlation of cosine and score, NaN where all of either are equal. Otherwise it is how
    often an anchor's own positive is the nearest among those of all examples, and the mean of 1 / its rank. Another
    text that is as near counts as nearer, so a model that gives all texts the same embedding is never right.
    """
    loss = pipe.loss
    assert isinstance(loss, EmbeddingLoss)
    # The mask leaves padding out, so any token serves as padding.
    _, batches = held_out.mini_batches(pipe, EmbeddingCollator(0, loss.rows_per_unit))
    vectors, scores = [], []
    texts: list[tuple[int, ...]] = []
    with pipe.ties.holding_values():
        for batch in shared_batches(batches, pipe.world):
            vectors.append(F.normalize(pipe.embed(batch), dim=1))
            scores.append(batch["labels"][:: loss.rows_per_unit])
            texts += map(tuple, tokens_of(batch)[1 :: loss.rows_per_unit])
    anchor, positive, *_ = torch.cat(vectors).view(-1, loss.rows_per_unit, vectors[0].shape[1]).unbind(dim=1)
    score, number = torch.cat(scores).double(), len(anchor)
    values: dict[str, float] = {"num_examples": number}
    note = ""
    if loss.needs_score:
        # Rounding alone makes no difference of cosines.
        ranks = torch.stack([_ranks((anchor * positive).sum(1).round(decimals=12)), _ranks(score)])
        values["spearman"], note = math.nan, "it is not known: all cosines or all scores are equal"
        if (ranks != ranks[:, :1]).any(dim=1).all():
            values["spearman"], note = float(torch.corrcoef(ranks)[0, 1]), ""
    else:
        numbers = {text: number for number, text in enumerate(texts)}
        text = torch.tensor([numbers[own] for own in texts])
        blocks = zip(anchor.split(1024), (anchor * positive).sum(1).split(1024), text.split(1024), strict=True)
        # A comparison with NaN is false, so a text whose cosine is NaN counts as nearer.
        is_further = (
            (some @ positive.t() < own[:, None] - 1e-12) | (of_own[:, None] == text) for some, own, of_own in blocks
        )
        ranks = 1 + torch.cat([(~block).sum(1) for block in is_further]).double()
        values |= {"accuracy": float((ranks == 1).double().mean()), "mean_reciprocal_rank": float((1 / ranks).mean())}
    return HeldOutReport("embeddings", values, ("examples", f"{number} examples"), note)


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """The rank of each of several numbers, (N,) in float64; equal numbers have their mean rank."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[inverse]


class _Embeddings(Task):
    items, rows_in_words, evaluating = "examples", "examples of texts", "comparing the texts"
    section = EmbeddingsSection
    head, trainer = "none", PipelineEmbeddingTrainer

    def reader(self, recipe: Recipe) -> Read:
        return partial(embedded_of, texts=recipe.embeddings.num_texts, prompts=recipe.embeddings.prompts)

    def rows(self, recipe: Recipe, split: Any, processor: Any) -> EmbeddingExamples:
        files = SentenceFiles.of(recipe.model.path)
        if recipe.embeddings.prompts:
            files.check_prompts()
        if files.lowers_case:
            lower_case(processor)
        return EmbeddingExamples(split, processor, max_length=recipe.data.max_length)

    def loss(self, recipe: Recipe) -> EmbeddingLoss:
        files = SentenceFiles.of(recipe.model.path)
        given = recipe.embeddings.pooling
        pooling = given if files.pooling is None or given != AUTO else files.pooling
        return EmbeddingLoss.of(recipe.embeddings).replace(pooling=pooling, normalizes=files.normalizes)

    def measure(self, recipe: Recipe, pipe: Pipeline, held_out: HeldOut, processor: Any) -> HeldOutReport:
        return evaluate_embeddings(pipe, held_out)


TASK = _Embeddings()
