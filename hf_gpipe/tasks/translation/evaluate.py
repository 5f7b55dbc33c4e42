"""How well a model translates: likelihood of the references, and what it generates beside what a copy would score.

Copying the source already scores chrF 20 to 30 where numbers and names are shared, and more between related languages;
a score says something only beside that of the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from sacrebleu.metrics import BLEU, CHRF
from transformers import EvalPrediction, PreTrainedTokenizerBase

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.adapters.text_entries import token_ids
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.errors import DataError
from hf_gpipe.from_recipe.held_out import HeldOut
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe.fields import EvaluationSection
from hf_gpipe.tasks.translation.buckets import BUCKETS, resource_buckets
from hf_gpipe.tasks.translation.pairs import ENGLISH, Pair, language_tag
from hf_gpipe.text import table_text
from hf_gpipe.training.generating import Generation
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.predicting import predict

#: A table has a line for each of so many languages; of more it has one for each bucket.
MOST_LINES = 12


@dataclass(frozen=True)
class Scores:
    """Scores of the pairs of one language, or averaged over languages.

    Attributes:
        num_pairs: how many pairs were translated.
        nll: negative log-likelihood per target token, natural logarithm.
        nll_per_character: the same sum over tokens, the end of the sequence included, divided by the references'
            characters (Unicode code points): comparable between vocabularies, as `nll` is not.
        exact_match: share of translations equal to their reference, 0 to 1.
        bleu: corpus BLEU, 0 to 100, of sacrebleu's tokenizer 13a (Papineni et al. 2002; Post 2018). n-grams longer
            than any text are left out, so that a perfect translation of short texts has 100.
        chrf: corpus chrF2, 0 to 100 (Popovic 2015).
        exact_match_copy, bleu_copy, chrf_copy: the same of the sources themselves.
    """

    num_pairs: int
    nll: float
    nll_per_character: float
    exact_match: float
    bleu: float
    chrf: float
    exact_match_copy: float
    bleu_copy: float
    chrf_copy: float


@dataclass(frozen=True)
class Translated:
    """A pair with its translation, and the negative log-likelihood of its reference with the characters it is of."""

    language: str
    source: str
    target: str
    translation: str
    nll: float
    num_characters: int


@dataclass(frozen=True)
class TranslationReport:
    """Scores of every language, the languages with the most pairs first, and the translations.

    Attributes:
        per_language: of the languages that were translated.
        translations: of all pairs, in their order.
        num_samples: how many of them are shown.
        training_pairs: how many pairs each language was trained on, where that is known.
    """

    per_language: dict[str, Scores]
    translations: tuple[Translated, ...]
    num_samples: int
    training_pairs: dict[str, int] = field(default_factory=dict)

    @property
    def samples(self) -> list[Translated]:
        """Some translations, from the first to the last at equal distances."""
        total = len(self.translations)
        count = min(self.num_samples, total)
        return [self.translations[i * total // count] for i in range(count)]

    @property
    def average(self) -> Scores:
        """The mean over languages, each of which counts alike; `num_pairs` is the sum."""
        return _average(self.per_language.values())

    @property
    def languages_of_bucket(self) -> dict[str, list[str]]:
        """The translated languages of high, middle and low resource: thirds of all those with training pairs known."""
        buckets = resource_buckets(self.training_pairs)
        members = {
            name: [language for language in self.per_language if buckets.get(language) == name] for name in BUCKETS
        }
        return {name: languages for name, languages in members.items() if languages}

    @property
    def per_bucket(self) -> dict[str, Scores]:
        """The mean over the languages of each bucket; empty where nothing is known of training pairs."""
        members = self.languages_of_bucket
        return {name: _average([self.per_language[code] for code in codes]) for name, codes in members.items()}

    def to_dict(self) -> dict[str, Any]:
        """The averages under their own names, and `per_bucket`, `per_language` and `samples`; ready for JSON."""
        members = self.languages_of_bucket
        bucket_of = {language: name for name, languages in members.items() for language in languages}
        per_language = {
            language: {
                **asdict(scores),
                "training_pairs": self.training_pairs.get(language),
                "bucket": bucket_of.get(language),
            }
            for language, scores in self.per_language.items()
        }
        per_bucket = {
            name: {
                **asdict(scores),
                "num_languages": len(members[name]),
                "training_pairs": sum(self.training_pairs[language] for language in members[name]),
            }
            for name, scores in self.per_bucket.items()
        }
        samples = [asdict(sample) for sample in self.samples]
        return {**asdict(self.average), "per_bucket": per_bucket, "per_language": per_language, "samples": samples}

    @property
    def is_long(self) -> bool:
        """Whether there are more languages than the table has lines for."""
        return len(self.per_language) > MOST_LINES

    def table(self) -> str:
        """The scores as text: a line a language, or, of more than 12, a line a bucket; and one for the average
        of several."""
        rows = list(self.per_language.items())
        if len(rows) > 1:
            rows.append(("average", self.average))
        if self.is_long:
            members = self.languages_of_bucket
            rows = [(f"{name} ({len(members[name])})", scores) for name, scores in self.per_bucket.items()]
            rows.append((f"average ({len(self.per_language)})", self.average))
        header = ["language", "pairs", "nll", "nll/char", "exact", "BLEU", "chrF", "copy: exact", "BLEU", "chrF"]
        if self.is_long:
            header[0] = "languages"
        return table_text([header, *([language, *_cells(scores)] for language, scores in rows)])

    def text(self, split: str) -> str:
        """The quality of each language and some translations, for people."""
        average = self.average
        parts = [
            f"Quality on held-out pairs ({split} split; `copy` is the score of the source)",
            self.table(),
            *(["Each row is the mean of its languages' scores; the metrics hold every language's."] * self.is_long),
            *(["Translations", self.sample_text()] if self.samples else []),
            f"exact match {average.exact_match:.3f}, chrF {average.chrf:.1f} (copying the source: "
            f"{average.chrf_copy:.1f})",
        ]
        return "\n\n".join(parts)

    def sample_text(self) -> str:
        """The samples as text: source, reference and translation below each other."""
        return "\n\n".join(
            f"{s.language}  source       {s.source}\n"
            f"{'':{len(s.language)}}  reference    {s.target}\n"
            f"{'':{len(s.language)}}  translation  {s.translation}"
            for s in self.samples
        )


def _average(rows: Collection[Scores]) -> Scores:
    """The mean of each score; `num_pairs` is the sum."""
    means = {f.name: sum(getattr(row, f.name) for row in rows) / len(rows) for f in fields(Scores)}
    return Scores(**{**means, "num_pairs": sum(row.num_pairs for row in rows)})


def _cells(scores: Scores) -> list[str]:
    return [
        str(scores.num_pairs),
        *(f"{scores.nll:.3f}", f"{scores.nll_per_character:.4f}"),
        *(f"{scores.exact_match:.3f}", f"{scores.bleu:.1f}", f"{scores.chrf:.1f}"),
        *(f"{scores.exact_match_copy:.3f}", f"{scores.bleu_copy:.1f}", f"{scores.chrf_copy:.1f}"),
    ]


def evaluate_translation(
    pipe: Pipeline,
    tokenizer: PreTrainedTokenizerBase | None,
    pairs: Sequence[Pair] | None,
    rows_of: Callable[[Sequence[Pair], Any], Any],
    evaluation: EvaluationSection,
    training_pairs: Mapping[str, int] | None = None,
) -> TranslationReport:
    """Translate, and score the translations and the likelihood of the references.

    Every process calls it, the pairs of the main process are used, the others may pass None, and every process gets the
    same report. Rows of similar length are translated together.

    Args:
        pipe: the model: an encoder-decoder, or a decoder-only model trained on "source </s> target </s>".
        tokenizer: of sources and targets; the other processes may pass None.
        pairs: the pairs to translate.
        rows_of: makes the `TokenizedPairs` of pairs, with a tokenizer. They cut long sources and, for the likelihood
            alone, long references: translations are compared with whole ones.
        evaluation: which pairs are translated, the first ones of each language, and how.
        training_pairs: of the main process: how many pairs each language was trained on (data.training_pairs), by
            which the report says what languages of high, middle and low resource score; None: unknown.

    Raises:
        DataError: on every process, where there is no pair, or tokenizer and limits do not fit.
    """
    #: In the main process: the pairs, the characters of their references, and the order in which they are translated.
    taken: list[Pair] = []
    num_characters: list[int] = []
    order: list[int] = []
    #: In the main process: the rows that are translated.
    encoded: list[Any] = []

    def make() -> Any:
        assert tokenizer is not None, "the main process has the tokenizer"
        taken.extend(_first_of_each_language(pairs or (), evaluation.max_examples))
        rows = rows_of(taken, tokenizer)
        encoded.append(rows)
        num_characters.extend(rows.num_characters)
        # Little of a mini-batch is padding where its rows are about equally long.
        order.extend(sorted(range(len(rows)), key=lambda i: (len(token_ids(rows[i])), rows.lengths[i])))
        return [rows[index] for index in order]

    def collate(rows: list[Any]) -> Batch:
        assert tokenizer is not None, "the main process has the tokenizer"
        return PairCollator.for_tokenizer(tokenizer)(rows)

    _, batches = HeldOut(make, evaluation.batch_size).mini_batches(pipe, collate)
    pad_token_id = pipe.world.from_main(lambda: None if tokenizer is None else tokenizer.pad_token_id)
    options = {name: getattr(evaluation, name) for name in ("max_new_tokens", "num_beams")}
    options |= {"do_sample": False, "num_return_sequences": 1}
    #: The translation of each pair, with the number of the reference's tokens.
    outcomes: dict[int, tuple[Translated, int]] = {}
    codes = encoded[0].codes if encoded else None
    start_argument = pipe.world.from_main(lambda: None if codes is None else codes.start_argument)
    generation = Generation(pipe, options, pad_token_id, start_argument)
    for predicted in predict(pipe, batches, generation=generation):
        if tokenizer is None or not pipe.world.is_main:
            continue
        assert predicted.tokens is not None, "there is a generation"
        texts = encoded[0].decoded(predicted.tokens)
        sums, counts = predicted.evaluation.row_nll.tolist(), predicted.evaluation.row_tokens.tolist()
        numbers = order[len(outcomes) : len(outcomes) + len(texts)]
        for index, text, nll, num_tokens in zip(numbers, texts, sums, counts, strict=True):
            pair, count = taken[index], num_characters[index]
            outcomes[index] = (
                Translated(pair.language, pair.source, pair.target, text.strip(), nll, count),
                num_tokens,
            )
    return pipe.world.from_main(
        lambda: _report([outcomes[i] for i in range(len(outcomes))], evaluation.samples, training_pairs or {}),
        TranslationReport,
    )


def _first_of_each_language(pairs: Sequence[Pair], count: int | None) -> Sequence[Pair]:
    if not pairs:
        raise DataError("there are no pairs to evaluate on; the split is empty")
    taken: dict[str, int] = {}
    chosen = []
    for pair in pairs:
        taken[pair.language] = taken.get(pair.language, 0) + 1
        if count is None or taken[pair.language] <= count:
            chosen.append(pair)
    return chosen


def _report(
    outcomes: Sequence[tuple[Translated, int]], num_samples: int, training_pairs: Mapping[str, int]
) -> TranslationReport:
    of_language: dict[str, list[tuple[Translated, int]]] = {}
    for outcome in outcomes:
        of_language.setdefault(outcome[0].language, []).append(outcome)
    largest_first = sorted(of_language, key=lambda language: -len(of_language[language]))
    per_language = {language: _score(of_language[language]) for language in largest_first}
    translations = tuple(translated for translated, _ in outcomes)
    return TranslationReport(per_language, translations, num_samples, dict(training_pairs))


def _score(outcomes: Sequence[tuple[Translated, int]]) -> Scores:
    pairs = [translated for translated, _ in outcomes]
    targets = [pair.target.strip() for pair in pairs]
    scores = _compare([pair.translation for pair in pairs], targets)
    scores_of_copy = _compare([_without_tag(pair) for pair in pairs], targets)
    nll = sum(pair.nll for pair in pairs)
    per_token = nll / max(sum(num_tokens for _, num_tokens in outcomes), 1)
    per_character = nll / max(sum(pair.num_characters for pair in pairs), 1)
    return Scores(len(pairs), per_token, per_character, *scores, *scores_of_copy)


def _compare(texts: list[str], targets: list[str]) -> tuple[float, float, float]:
    """Exact match, BLEU and chrF."""
    exact = sum(text == target for text, target in zip(texts, targets, strict=True)) / len(targets)
    bleu = BLEU(effective_order=True, force=True).corpus_score(texts, [targets]).score
    return exact, bleu, CHRF().corpus_score(texts, [targets]).score


def _without_tag(pair: Translated) -> str:
    """The source as a reader sees it."""
    text = pair.source
    for language in (pair.language, ENGLISH):
        text = text.removeprefix(language_tag(language))
    return text.strip()


@dataclass(frozen=True)
class PerCharacter:
    """`compute_metrics` of a trainer: the validation loss per character, comparable between vocabularies.

    The trainer's arguments have include_for_metrics=["loss"].

    Attributes:
        num_characters: of all references.
    """

    num_characters: int

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        """The negative log-likelihood of all references, divided by their characters; natural logarithm."""
        num_tokens = (prediction.label_ids != IGNORED_LABEL).sum(axis=1)
        return {"nll_per_character": float((prediction.losses * num_tokens).sum() / max(self.num_characters, 1))}


def without_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`preprocess_logits_for_metrics` that keeps one number of each row, for this metric needs the losses alone."""
    return logits[:, 0, 0]
