"""How well a model translates: likelihood of the references, and what it generates beside what a copy would score.

Copying the source already scores chrF 20 to 30 where numbers and names are shared, and more between related languages;
a score says something only beside that of the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from sacrebleu.metrics import BLEU, CHRF
from transformers import PreTrainedTokenizerBase

from hf_gpipe.data.collate import PairCollator
from hf_gpipe.data.pairs import ENGLISH, Pair, language_tag
from hf_gpipe.data.tokenized import TokenizedPairs, encode_sources
from hf_gpipe.errors import DataError
from hf_gpipe.pipeline import Pipeline


@dataclass(frozen=True)
class Scores:
    """Of the pairs of one language, or averaged over languages.

    Attributes:
        num_pairs: how many pairs were translated.
        nll: negative log-likelihood per target token, natural logarithm.
        exact_match: share of translations equal to their reference, 0 to 1.
        bleu: corpus BLEU, 0 to 100, of sacrebleu's tokenizer 13a (Papineni et al. 2002; Post 2018). n-grams longer
            than any text are left out, so that a perfect translation of short texts has 100.
        chrf: corpus chrF2, 0 to 100 (Popovic 2015).
        exact_match_copy, bleu_copy, chrf_copy: the same of the sources themselves.
    """

    num_pairs: int
    nll: float
    exact_match: float
    bleu: float
    chrf: float
    exact_match_copy: float
    bleu_copy: float
    chrf_copy: float


@dataclass(frozen=True)
class Sample:
    """One translation, to be read."""

    language: str
    source: str
    target: str
    translation: str


@dataclass(frozen=True)
class TranslationReport:
    """Scores of every language, the languages with the most pairs first, and a few samples."""

    per_language: dict[str, Scores]
    samples: tuple[Sample, ...]

    @property
    def average(self) -> Scores:
        """The mean over languages, each of which counts alike; `num_pairs` is the sum."""
        rows = list(self.per_language.values())
        means = {f.name: sum(getattr(row, f.name) for row in rows) / len(rows) for f in fields(Scores)}
        return Scores(**{**means, "num_pairs": sum(row.num_pairs for row in rows)})

    def to_dict(self) -> dict[str, Any]:
        """The averages under their own names, and `per_language` and `samples`; ready for JSON."""
        per_language = {language: asdict(scores) for language, scores in self.per_language.items()}
        samples = [asdict(sample) for sample in self.samples]
        return {**asdict(self.average), "per_language": per_language, "samples": samples}

    def table(self) -> str:
        """The scores as text, a line a language and one for the average."""
        rows = [*self.per_language.items(), ("average", self.average)]
        header = ["language", "pairs", "nll", "exact", "BLEU", "chrF", "copy: exact", "BLEU", "chrF"]
        cells = [header, *([language, *_cells(scores)] for language, scores in rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in cells
        )

    def sample_text(self) -> str:
        """The samples as text: source, reference and translation below each other."""
        return "\n\n".join(
            f"{s.language}  source       {s.source}\n"
            f"{'':{len(s.language)}}  reference    {s.target}\n"
            f"{'':{len(s.language)}}  translation  {s.translation}"
            for s in self.samples
        )


def _cells(scores: Scores) -> list[str]:
    return [
        str(scores.num_pairs),
        f"{scores.nll:.3f}",
        *(f"{scores.exact_match:.3f}", f"{scores.bleu:.1f}", f"{scores.chrf:.1f}"),
        *(f"{scores.exact_match_copy:.3f}", f"{scores.bleu_copy:.1f}", f"{scores.chrf_copy:.1f}"),
    ]


def evaluate_translation(
    pipe: Pipeline,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair] | None,
    batch_size: int,
    max_new_tokens: int,
    *,
    max_source_tokens: int,
    max_target_tokens: int,
    max_examples: int | None = None,
    num_samples: int = 5,
) -> TranslationReport:
    """Translate by greedy generation, and score the translations and the likelihood of the references.

    Every process calls it, the pairs of the main process are used, the others may pass None, and every process gets the
    same report. Rows of similar length are translated together.

    Args:
        pipe: the model: an encoder-decoder, or a decoder-only model trained on "source </s> target </s>".
        tokenizer: of sources and targets.
        pairs: what to translate.
        batch_size: rows translated at a time; for the likelihood they are cut into the pipeline's micro-batches.
        max_new_tokens: longest translation.
        max_source_tokens: longer sources are cut.
        max_target_tokens: longer references are cut for the likelihood; translations are compared with all of them.
        max_examples: how many pairs of each language to take, the first ones; None: all.
        num_samples: translations to keep in the report.

    Raises:
        DataError: on every process, where there is no pair, or tokenizer and limits do not fit.
    """
    work = _Work([], [])

    def prepare() -> int:
        work.pairs = _first_of_each_language(pairs or (), max_examples)
        work.batches = _batches(pipe, tokenizer, work.pairs, batch_size, max_source_tokens, max_target_tokens)
        return len(work.batches)

    num_batches = pipe.topology.from_main(prepare)
    outcomes: dict[int, _Outcome] = {}
    with pipe.holding_weights():
        for number in range(num_batches):
            batch = work.batches[number] if pipe.topology.is_main else _Batch([], {}, {})
            evaluation = pipe.eval_step(batch.with_targets)
            options = {"max_new_tokens": max_new_tokens, "num_beams": 1, "do_sample": False, "num_return_sequences": 1}
            ids = pipe.generate(**batch.prompts, **options)
            if not pipe.topology.is_main:
                continue
            prompt_tokens = 0 if pipe.adapter.config.is_encoder_decoder else batch.prompts["input_ids"].shape[1]
            texts = tokenizer.batch_decode(ids[:, prompt_tokens:], skip_special_tokens=True)
            sums, counts = evaluation.row_nll.tolist(), evaluation.row_tokens.tolist()
            for index, text, nll, num_tokens in zip(batch.indices, texts, sums, counts, strict=True):
                outcomes[index] = _Outcome(text.strip(), nll, num_tokens)
    return pipe.topology.from_main(lambda: _report(work.pairs, outcomes, num_samples))


@dataclass
class _Batch:
    """Rows translated together: their places among the pairs, and the tensors of the two forwards."""

    indices: list[int]
    with_targets: dict[str, torch.Tensor]
    prompts: dict[str, torch.Tensor]


@dataclass
class _Work:
    """What the main process alone has."""

    pairs: Sequence[Pair]
    batches: list[_Batch]


@dataclass(frozen=True)
class _Outcome:
    """Of one pair: the translation, and the reference's negative log-likelihood and number of tokens."""

    translation: str
    nll: float
    num_tokens: int


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


def _batches(
    pipe: Pipeline,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    batch_size: int,
    max_source_tokens: int,
    max_target_tokens: int,
) -> list[_Batch]:
    """Mini-batches of rows sorted by length, so that little of them is padding."""
    decoder_only = not pipe.adapter.config.is_encoder_decoder
    rows = TokenizedPairs(
        pairs,
        tokenizer,
        max_source_tokens=max_source_tokens,
        max_target_tokens=max_target_tokens,
        decoder_only=decoder_only,
    )
    sources, _ = encode_sources([p.source for p in pairs], tokenizer, max_source_tokens, decoder_only=decoder_only)
    # Padding is masked, so that any token serves where the tokenizer has none for it.
    padding = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
    collate = PairCollator(padding)
    collate_prompts = PairCollator(padding, "left" if decoder_only else "right")
    lengths = rows.lengths
    order = sorted(range(len(pairs)), key=lambda i: (len(sources[i]), lengths[i]))
    return [
        _Batch(
            indices,
            collate([rows[i] for i in indices]),
            collate_prompts([{"input_ids": sources[i]} for i in indices]),
        )
        for indices in (order[start : start + batch_size] for start in range(0, len(order), batch_size))
    ]


def _report(pairs: Sequence[Pair], outcomes: dict[int, _Outcome], num_samples: int) -> TranslationReport:
    of_language: dict[str, list[int]] = {}
    for index, pair in enumerate(pairs):
        of_language.setdefault(pair.language, []).append(index)
    largest_first = sorted(of_language, key=lambda language: -len(of_language[language]))
    per_language = {
        language: _score([pairs[i] for i in of_language[language]], [outcomes[i] for i in of_language[language]])
        for language in largest_first
    }
    count = min(num_samples, len(pairs))
    chosen = [i * len(pairs) // count for i in range(count)]
    samples = (Sample(pairs[i].language, pairs[i].source, pairs[i].target, outcomes[i].translation) for i in chosen)
    return TranslationReport(per_language, tuple(samples))


def _score(pairs: Sequence[Pair], outcomes: Sequence[_Outcome]) -> Scores:
    targets = [pair.target.strip() for pair in pairs]
    exact_match, bleu, chrf = _compare([outcome.translation for outcome in outcomes], targets)
    exact_match_copy, bleu_copy, chrf_copy = _compare([_without_tag(pair) for pair in pairs], targets)
    num_tokens = sum(outcome.num_tokens for outcome in outcomes)
    nll = sum(outcome.nll for outcome in outcomes) / max(num_tokens, 1)
    return Scores(len(pairs), nll, exact_match, bleu, chrf, exact_match_copy, bleu_copy, chrf_copy)


def _compare(texts: list[str], targets: list[str]) -> tuple[float, float, float]:
    """Exact match, BLEU and chrF."""
    exact = sum(text == target for text, target in zip(texts, targets, strict=True)) / len(targets)
    bleu = BLEU(effective_order=True, force=True).corpus_score(texts, [targets]).score
    return exact, bleu, CHRF().corpus_score(texts, [targets]).score


def _without_tag(pair: Pair) -> str:
    """The source as a reader sees it."""
    text = pair.source
    for language in (pair.language, ENGLISH):
        text = text.removeprefix(language_tag(language))
    return text.strip()
