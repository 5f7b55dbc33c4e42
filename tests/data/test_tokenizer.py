"""The trained tokenizer, as a plain transformers user loads it."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BartConfig, LlamaConfig, M2M100Config, MarianConfig, T5Config

from hf_gpipe.data import train_tokenizer
from hf_gpipe.data.tokenizer import MODELS, _train
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.translation.cldr import cldr_corpus

CORPUS = cldr_corpus(
    DataSection(kind="cldr", languages=["de", "ru", "zh"], examples_per_language=300, direction="both")
)
TEXTS = list(CORPUS.texts())
VOCAB_SIZE = 900

TRICKY = [
    "Größe, Übung, naïve, Ångström",
    "e\u0301 and \u00e9 are not the same",
    "日本語のテキスト、中文",
    "العَرَبِيَّة ‏من اليمين",
    "नमस्ते दुनिया",
    "👩‍👩‍👧‍👦 🎉",
    "two  spaces,   three",
    " leading and trailing ",
    "tab\tnewline\nreturn\r\n",
    "non\u00a0breaking\u202fspaces",
    "ﬁ ㍿ x²",
    "<0x41> is no byte, < 0x41 neither",
    "",
]


@pytest.fixture(scope="module", params=MODELS)
def trained(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    tokenizer = train_tokenizer(
        TEXTS, VOCAB_SIZE, directory, model=request.param, character_coverage=0.999, target_tags=CORPUS.target_tags
    )
    return directory, tokenizer


def test_auto_tokenizer_loads_it_and_every_text_comes_back(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    for text in [*TRICKY, *TEXTS]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text + "</s>"


@pytest.mark.parametrize("config", [MarianConfig, M2M100Config, BartConfig, T5Config, LlamaConfig])
def test_a_model_in_the_same_directory_does_not_change_the_tokenizer(trained, config):
    """AutoTokenizer looks at config.json too, where these families have tokenizer classes of their own."""
    directory, tokenizer = trained
    config().save_pretrained(directory)
    loaded = AutoTokenizer.from_pretrained(directory)
    (directory / "config.json").unlink()
    assert [loaded(text).input_ids for text in TRICKY] == [tokenizer(text).input_ids for text in TRICKY]


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), max_size=20))
def test_any_text_comes_back(trained, text):
    tokenizer = trained[1]
    assume(not any(token in text for token in tokenizer.all_special_tokens))
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_ids_are_sentencepiece_ids(trained):
    """The conversion for transformers must not cut a text differently from SentencePiece itself."""
    _, tokenizer = trained
    model = "bpe" if "bpe" in str(trained[0]) else "unigram"
    processor = _train(TEXTS, VOCAB_SIZE, model, 0.999, CORPUS.target_tags)
    for text in [*TRICKY, *(text for text in TEXTS if not text.startswith("<2"))]:
        assert tokenizer(text).input_ids == [*processor.encode(text), 1], text


def test_special_tokens(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    assert len(tokenizer) == VOCAB_SIZE
    assert [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id] == [
        0,
        1,
        2,
        3,
    ]
    assert tokenizer("3 days").input_ids[-1] == tokenizer(text_target="3 days").input_ids[-1] == 1
    assert sorted(tokenizer("3 days")) == ["attention_mask", "input_ids"]
    assert tokenizer(["3 days", "in 3 days"], padding=True)["attention_mask"][0][-1] == 0
    assert tokenizer("3 days " * 50, truncation=True, max_length=8).input_ids[-1] == 1


def test_tags_are_one_token_each(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    plain, with_tag = tokenizer("in 3 days").input_ids, tokenizer("<2zh> in 3 days").input_ids
    assert with_tag[1:] == plain
    assert with_tag[0] == tokenizer.convert_tokens_to_ids("<2zh>") > 3
    assert tokenizer.decode(with_tag) == "<2zh> in 3 days</s>"
    assert tokenizer.decode(with_tag, skip_special_tokens=True) == "in 3 days"


def test_digits_stay_apart(trained):
    tokenizer = trained[1]
    assert [token for token in tokenizer.tokenize("in 407 days") if token.strip("▁").isdigit()] == ["4", "0", "7"]


def test_training_is_deterministic(trained, tmp_path):
    directory, _ = trained
    model = "bpe" if "bpe" in str(directory) else "unigram"
    train_tokenizer(TEXTS, VOCAB_SIZE, tmp_path, model=model, character_coverage=0.999, target_tags=CORPUS.target_tags)
    assert (tmp_path / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("model", MODELS)
def test_a_vocabulary_that_the_text_cannot_fill_is_refused_with_one_that_it_can(tmp_path, model):
    with pytest.raises(DataError, match=r"vocab_size is 50000, but the training texts yield at most (\d+)") as error:
        train_tokenizer(TEXTS, 50_000, tmp_path, model=model)
    possible = int(str(error.value).split("at most ")[1].split()[0])
    assert len(train_tokenizer(TEXTS, possible, tmp_path, model=model)) == possible


@pytest.mark.parametrize("model", MODELS)
def test_a_vocabulary_that_cannot_hold_the_characters_is_refused_with_one_that_can(tmp_path, model):
    with pytest.raises(DataError, match=r"vocab_size is 270, .* need (\d+); raise vocab_size") as error:
        train_tokenizer(TEXTS, 270, tmp_path, model=model)
    needed = int(str(error.value).split(" need ")[1].split(";")[0])
    assert len(train_tokenizer(TEXTS, needed, tmp_path, model=model)) == needed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"texts": []}, "no text to train on"),
        ({"vocab_size": 0}, "cannot train a vocabulary of 0 tokens"),
        ({"model": "unigramm"}, r"model 'unigramm' is unknown; did you mean 'unigram'\?"),
    ],
)
def test_other_impossible_wishes_are_refused(tmp_path, arguments, message):
    with pytest.raises(DataError, match=message):
        train_tokenizer(**{"texts": TEXTS, "vocab_size": VOCAB_SIZE, "directory": tmp_path, **arguments})


def test_a_long_text_is_trained_on_too(tmp_path):
    """SentencePiece leaves out texts above 4,192 bytes unless told otherwise; their characters would get no token."""
    texts = [*TEXTS, "Ж" * 10 + " привет мир" * 3000 + " Ѣ"]
    assert "Ѣ" in train_tokenizer(texts, VOCAB_SIZE, tmp_path).get_vocab()
