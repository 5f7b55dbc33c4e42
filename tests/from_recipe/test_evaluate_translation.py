"""Evaluation of translations: the plain model's, in the order of the pairs, the same report on every process."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sacrebleu.metrics import CHRF
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.data.tokenizer import train_tokenizer
from hf_gpipe.errors import DataError
from hf_gpipe.pipeline import Evaluation
from hf_gpipe.recipe.fields import EvaluationSection
from hf_gpipe.tasks.translation.evaluate import TranslationReport, evaluate_translation
from hf_gpipe.tasks.translation.pairs import Pair
from hf_gpipe.tasks.translation.tokenized import TokenizedPairs
from tests.gloo import run_gloo
from tests.oracle import plain_model, tiny_config

MONTHS = {"de": ["Januar", "Februar", "März", "Mai"], "fr": ["janvier", "février", "mars", "mai"]}
ENGLISH = ["January", "February", "March", "May"]
VOCABULARY = 290


def translate(
    pipe: Any,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[Pair] | None,
    batch_size: int,
    max_new_tokens: int,
    training_pairs: dict[str, int] | None = None,
    *,
    max_target_tokens: int = 30,
    **options: Any,
) -> TranslationReport:
    limits: dict[str, Any] = {"max_source_tokens": 30, "max_target_tokens": max_target_tokens}
    rows_of = partial(TokenizedPairs, decoder_only=not pipe.adapter.config.is_encoder_decoder, **limits)
    evaluation = EvaluationSection(batch_size=batch_size, max_new_tokens=max_new_tokens, **options)
    return evaluate_translation(pipe, tokenizer, pairs, rows_of, evaluation, training_pairs)


def some_pairs() -> list[Pair]:
    """Seven German and three French ones, of unequal lengths and not sorted by them."""
    pairs = [
        Pair(f"{day}. {month}", f"{day} {english}", "de", english)
        for day in (3, 11)
        for month, english in zip(MONTHS["de"], ENGLISH, strict=True)
    ][:7]
    pairs += [
        Pair(f"le {7} {month}", f"7 {english}", "fr", english)
        for month, english in zip(MONTHS["fr"][:3], ENGLISH, strict=False)
    ]
    return pairs[::2] + pairs[1::2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a tokenizer of the pairs' texts is."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([text for pair in some_pairs() for text in (pair.source, pair.target)], VOCABULARY, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def random_model(family: str) -> PreTrainedModel:
    """Weights so large that what it generates depends on what it read."""
    config = tiny_config(family, tied=False)
    config.vocab_size = config.decoder_vocab_size = VOCABULARY
    model = plain_model(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5, generator=generator)
    model.set_attn_implementation("sdpa")
    return model.eval()


def one_by_one(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pair: Pair, num_beams: int
) -> tuple[str, float, int]:
    """Translation and likelihood of one pair by the plain model, without padding."""
    source, target = (tokenizer(text, return_tensors="pt").input_ids for text in (pair.source, pair.target))
    decoder_only = not model.config.is_encoder_decoder
    ids = model.generate(input_ids=source, max_new_tokens=6, num_beams=num_beams, do_sample=False)
    text = tokenizer.decode(ids[0, source.shape[1] * decoder_only :], skip_special_tokens=True)
    if decoder_only:
        whole = torch.cat([source, target], dim=1)
        logits = model(input_ids=whole).logits[:, source.shape[1] - 1 : -1]
    else:
        logits = model(input_ids=source, labels=target).logits
    nll = torch.nn.functional.cross_entropy(logits[0], target[0], reduction="sum")
    return text.strip(), float(nll), target.shape[1]


@pytest.mark.parametrize(("family", "num_beams"), [("marian", 3), ("llama", 1)])
@torch.no_grad()
def test_translations_and_likelihood_of_the_plain_model(
    family: str, num_beams: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    model, pairs = random_model(family), some_pairs()
    report = translate(Pipeline(model, 3, 2), tokenizer, pairs, 4, 6, num_beams=num_beams)
    plain = [one_by_one(model, tokenizer, pair, num_beams) for pair in pairs]
    assert [one.translation for one in report.translations] == [text for text, _, _ in plain]
    assert [one.nll for one in report.translations] == pytest.approx([nll for _, nll, _ in plain], rel=1e-5)
    assert [one.num_characters for one in report.translations] == [len(pair.target) for pair in pairs]
    assert len({text for text, _, _ in plain}) > 3
    assert list(report.per_language) == ["de", "fr"]
    for language, scores in report.per_language.items():
        mine = [i for i, pair in enumerate(pairs) if pair.language == language]
        assert scores.num_pairs == len(mine)
        nll = sum(plain[i][1] for i in mine)
        assert scores.nll == pytest.approx(nll / sum(plain[i][2] for i in mine), rel=1e-6)
        assert scores.nll_per_character == pytest.approx(nll / sum(len(pairs[i].target) for i in mine), rel=1e-6)
        chrf = CHRF().corpus_score([plain[i][0] for i in mine], [[pairs[i].target for i in mine]]).score
        assert scores.chrf == pytest.approx(chrf)


class _OneProcess:
    is_main = True
    num_processes = 1
    device = torch.device("cpu")

    @staticmethod
    def from_main(function: Any, *_: Any, **__: Any) -> Any:
        return function()


class _Parrot:
    """In place of a Pipeline: translates every source as the dictionary says."""

    world = _OneProcess()
    seed = step = 0

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dictionary: dict[str, str]) -> None:
        self.adapter = adapter_for(tiny_config("marian"))
        self.adapter.reference.generation_config = GenerationConfig()
        self._tokenizer, self._dictionary = tokenizer, dictionary
        self.num_tokens = 0
        self.steps, self.ties = self, SimpleNamespace(holding_values=nullcontext)

    def eval_on(self, batch: dict[str, torch.Tensor], on_logits: None) -> Evaluation:
        rows = batch["input_ids"].shape[0]
        self.num_tokens += batch["input_ids"].numel()
        losses = torch.full((rows,), 2.0)
        return Evaluation(losses, losses, torch.full((rows,), 4))

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        sources = self._tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        texts = [self._dictionary[source] for source in sources]
        return self._tokenizer(texts, padding=True, return_tensors="pt").input_ids


def echo(tokenizer: PreTrainedTokenizerBase, pairs: list[Pair], wrong: int = 0, **options: Any) -> TranslationReport:
    """The report of a model that knows every reference, but for the first `wrong`, which it copies."""
    dictionary = {pair.source: pair.source if i < wrong else pair.target for i, pair in enumerate(pairs)}
    return translate(_Parrot(tokenizer, dictionary), tokenizer, pairs, 3, 20, **options)


def test_a_perfect_translation_has_full_scores_even_where_texts_are_short(tokenizer: PreTrainedTokenizerBase) -> None:
    """Plain corpus BLEU is 0 where no text has four words."""
    average = echo(tokenizer, some_pairs()).average
    assert (average.exact_match, average.bleu, average.chrf) == pytest.approx((1, 100, 100))
    assert average.nll == pytest.approx(0.5)
    assert average.num_pairs == 10
    assert average.exact_match_copy == 0
    assert 0 < average.chrf_copy < 60


def test_copying_scores_what_copies_are_said_to_score(tokenizer: PreTrainedTokenizerBase) -> None:
    average = echo(tokenizer, some_pairs(), wrong=10).average
    assert average.chrf == average.chrf_copy > 0
    assert average.bleu == average.bleu_copy


def test_a_target_tag_is_no_part_of_the_copy(tokenizer: PreTrainedTokenizerBase) -> None:
    plain = [Pair(f"{day} May", f"{day}. May", "de", str(day)) for day in range(3, 9)]
    tagged = [pair._replace(source=f"<2de> {pair.source}") for pair in plain]
    assert echo(tokenizer, tagged).average.chrf_copy == echo(tokenizer, plain).average.chrf_copy


def test_languages_count_alike_and_may_be_limited(tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = sorted(some_pairs(), key=lambda pair: pair.language)
    report = echo(tokenizer, pairs, wrong=7)
    assert [scores.exact_match for scores in report.per_language.values()] == [0, 1]
    assert report.average.exact_match == 0.5
    limited = echo(tokenizer, pairs, wrong=7, max_examples=2, samples=3)
    assert {language: scores.num_pairs for language, scores in limited.per_language.items()} == {"de": 2, "fr": 2}
    assert [sample.source for sample in limited.samples] == [pairs[0].source, pairs[1].source, pairs[7].source]


def test_rows_of_similar_length_are_translated_together(tokenizer: PreTrainedTokenizerBase) -> None:
    lengths = [1, 9, 2, 8, 1, 9]
    pairs = [Pair(" ".join(["3"] * n), "3", "de", str(i)) for i, n in enumerate(lengths)]
    parrot = _Parrot(tokenizer, {pair.source: pair.target for pair in pairs})
    translate(parrot, tokenizer, pairs, 3, 20)
    tokens = sorted(len(tokenizer(pair.source).input_ids) for pair in pairs)
    assert parrot.num_tokens == 3 * tokens[2] + 3 * tokens[5]


def test_table_is_aligned_and_the_dictionary_is_plain(tokenizer: PreTrainedTokenizerBase) -> None:
    report = echo(tokenizer, some_pairs(), wrong=4)
    lines = report.table().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[0] for line in lines] == ["language", "de", "fr", "average"]
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["chrf"] == report.average.chrf
    assert plain["per_language"]["fr"]["exact_match"] == report.per_language["fr"].exact_match
    keys = {"exact_match", "bleu", "chrf", "chrf_copy", "nll", "nll_per_character", "per_bucket", "per_language"}
    assert keys | {"samples"} <= plain.keys()
    sample = report.samples[0]
    for text in (sample.source, sample.target, sample.translation):
        assert text in report.sample_text()


def test_likelihood_per_character_counts_what_was_left_of_a_cut_reference(tokenizer: PreTrainedTokenizerBase) -> None:
    pair = Pair("3. Mai", "11 March 11 March 11 March", "de", "")
    kept = tokenizer.decode(tokenizer(pair.target).input_ids[:5], skip_special_tokens=True)
    assert 0 < len(kept) < len(pair.target)
    parrot = _Parrot(tokenizer, {pair.source: pair.target})
    for limit, characters in ((6, len(kept)), (30, len(pair.target))):
        scores = translate(parrot, tokenizer, [pair], 3, 20, max_target_tokens=limit).average
        # The parrot says 2 of every row.
        assert scores.nll_per_character == pytest.approx(2 / characters)


def many_pairs(num_languages: int) -> list[Pair]:
    return [Pair(f"{n} Mai", f"{n} May", f"l{n:02}", str(n)) for n in range(num_languages)]


def test_buckets_are_of_all_training_languages_and_average_their_languages(tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = many_pairs(5)
    counts = {pair.language: 100 - n for n, pair in enumerate(pairs)} | {"unseen": 1000}
    report = echo(tokenizer, pairs, wrong=1, training_pairs=counts)
    plain = json.loads(json.dumps(report.to_dict()))
    assert {language: row["bucket"] for language, row in plain["per_language"].items()} == {
        "l00": "high",
        "l01": "middle",
        "l02": "middle",
        "l03": "low",
        "l04": "low",
    }
    assert [row["training_pairs"] for row in plain["per_language"].values()] == [100, 99, 98, 97, 96]
    assert list(plain["per_bucket"]) == ["high", "middle", "low"]
    assert {name: row["exact_match"] for name, row in plain["per_bucket"].items()} == {"high": 0, "middle": 1, "low": 1}
    low = plain["per_bucket"]["low"]
    assert (low["num_languages"], low["training_pairs"], low["num_pairs"]) == (2, 97 + 96, 2)
    assert low["nll_per_character"] == report.per_language["l03"].nll_per_character
    assert plain["nll_per_character"] == report.average.nll_per_character > 0


def test_nothing_is_made_up_where_training_pairs_are_unknown(tokenizer: PreTrainedTokenizerBase) -> None:
    plain = echo(tokenizer, many_pairs(3)).to_dict()
    assert plain["per_bucket"] == {}
    assert all(row["bucket"] is row["training_pairs"] is None for row in plain["per_language"].values())


@pytest.mark.parametrize("known", [True, False])
def test_the_table_of_many_languages_is_short(tokenizer: PreTrainedTokenizerBase, known: bool) -> None:
    pairs = many_pairs(14)
    counts = {pair.language: n + 1 for n, pair in enumerate(pairs)} if known else None
    lines = echo(tokenizer, pairs, training_pairs=counts).table().splitlines()
    assert len({len(line) for line in lines}) == 1
    buckets = ["high (5)", "middle (5)", "low (4)"] if known else []
    assert [line.split("  ")[0] for line in lines] == ["languages", *buckets, "average (14)"]
    assert len(echo(tokenizer, many_pairs(12), training_pairs=counts).table().splitlines()) == 14
    # A single language is its own average.
    assert len(echo(tokenizer, many_pairs(1), training_pairs=counts).table().splitlines()) == 2


def test_no_pairs_are_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="no pairs to evaluate"):
        echo(tokenizer, [])


def _on_two_processes(folder: Path) -> tuple[TranslationReport, str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pipe = Pipeline(random_model("marian"), 3)
    pairs = some_pairs() if pipe.world.is_main else None
    counts = {"de": 3, "fr": 2} if pipe.world.is_main else None
    report = translate(pipe, tokenizer, pairs, 4, 6, counts)
    try:
        translate(pipe, tokenizer, [], 4, 6)
    except DataError as error:
        return report, str(error)
    return report, ""


def test_two_gloo_processes(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = random_model("marian")
    counts = {"de": 3, "fr": 2}
    alone = translate(Pipeline(model, 3), tokenizer, some_pairs(), 4, 6, counts)
    for report, error in run_gloo(_on_two_processes, 2, folder):
        assert report == alone
        assert "no pairs" in error
