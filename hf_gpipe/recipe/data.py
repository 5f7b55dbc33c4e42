"""The section `data` of a recipe, and the kinds of data by which its keys are allowed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hf_gpipe.errors import DataError
from hf_gpipe.registry import has_own_task
from hf_gpipe.settings.kinds import (
    BY_TARGETS,
    CHAT,
    CLDR,
    FIELDS,
    IMAGE_TEXT,
    IMAGES,
    KINDS,
    LABELLED,
    MESSAGE_KINDS,
    OF_THE_HUB,
    PAIRS,
    READ,
    ROW_KINDS,
    ROW_LENGTH_KINDS,
    files_like,
    uses,
)
from hf_gpipe.settings.section import (
    MAY_CHANGE,
    Count,
    Fraction,
    NotNegative,
    Place,
    Settings,
    Text,
    one_of,
    refuse_given,
)
from hf_gpipe.text import show

#: The files of kinds that read files of these names, or a data set of the Hub.
_FILES = {
    "text": ".txt, .jsonl or .parquet",
    **dict.fromkeys(ROW_LENGTH_KINDS, ".jsonl, .json or .parquet"),
    "images": "a directory of images, or .parquet",
    "image_text": ".parquet",
}
#: What the required path of a kind is, in words.
PATHS = {
    "jsonl": "the file, one JSON object per line",
    "csv": "the file, whose first line names the columns",
    "parquet": "the file",
    "parallel": "the file with a source on each line",
    "hub": "the id of a data set of the Hub, or a directory of that form",
    **{kind: f"{files} files, or a Hub data set's name" for kind, files in _FILES.items()},
}


Temperature = Annotated[float, Field(ge=1)]
"""T, by which languages with few rows are drawn more often."""


class DataSection(Settings):
    """The corpus. A key that its kind does not use is an error."""

    kind: Annotated[str, one_of(*KINDS, other=has_own_task)]
    """Where the data come from. cldr: dates, units, prices and names generated offline from Unicode CLDR. Pairs from
    local files: jsonl, one JSON object per line; csv, also with tabs; parquet; parallel, two text files whose lines
    translate each other. hub: pairs of a data set of the Hugging Face Hub, or of a directory of the same form. text:
    documents for a decoder-only model, cut into blocks of `max_target_tokens`. chat: conversations for a decoder-only
    model, or prompts and completions. preferences: prompts with a chosen and a rejected answer, for a decoder-only
    model (section `preferences`). kto: prompts with an answer and a label, true or 1 where the answer is wanted, for a
    decoder-only model (section `kto`). rewards: rows as for preferences, for a reward model, which is a decoder-only
    model with a head of one number. classification: texts with a label, for a decoder-only model with a new head or
    that of its checkpoint. embeddings: rows of two texts or more, the
    first of which belongs to the second and not to the others, or of two texts and a score, for an encoder or a
    decoder-only model without its head (section `embeddings`). prompts: prompts with an answer, for a decoder-only
    model that learns from rewards of its own completions (section `grpo`). images: images with a label, for an image
    classifier. image_text: conversations, or prompts and completions, with images, for a model of images and text."""

    seed: int = 0
    """Seed for generating and sampling the corpus; `training.seed` decides the order of training examples."""

    languages: Annotated[list[Text], PAIRS] = Field(default_factory=list)
    """The languages other than English. cldr: CLDR codes, the largest language first; other kinds: the languages to
    keep, empty: all. {language} in `path`, `target_path`, `subset` or a field stands for each of them."""

    num_languages: Annotated[Count | None, CLDR] = None
    """Number of languages, instead of `languages`: those for which CLDR supports most of `templates` come first."""

    rank_seed: Annotated[int | None, CLDR] = None
    """Seed that shuffles the sizes among the languages; null: sizes fall in the order of the languages."""

    validation_fraction: Fraction = 0.05
    """Share of the pairs, documents or conversations held out for evaluation during training."""

    test_fraction: Fraction = 0.05
    """Share of the pairs, documents or conversations held out for evaluation at the end."""

    temperature: Annotated[Temperature, PAIRS] = 1.0
    """T: a language with a share s of the training pairs is sampled in proportion to s ** (1 / T). 1: in proportion to
    the share; larger: small languages more often, large languages less often."""

    target_tag: Annotated[bool, PAIRS] = False
    """Whether sources start with a tag for the target language, such as <2de>; always if there are several
    target languages and one side is known to be English."""

    language_codes: Annotated[dict[str, Any], PAIRS] = Field(default_factory=dict)
    """Codes of a loaded tokenizer that has codes of languages, such as NLLB's and M2M-100's, for languages that it
    calls otherwise: {de: deu_Latn, en: eng_Latn}. Rows of an encoder-decoder then have these in place of tags."""

    max_source_tokens: Annotated[int, Field(ge=2), PAIRS] = 128
    """Maximum length of a source in tokens, special tokens included; longer sources are truncated."""

    max_target_tokens: Annotated[int, Field(ge=2), BY_TARGETS] = 128
    """Maximum length of a target in tokens, special tokens included; longer targets are truncated. text: tokens per
    block."""

    templates: Annotated[list[Text], CLDR] = Field(default_factory=list)
    """Templates of the phrases, such as date_long or price; empty: all."""

    direction: Annotated[Literal["to_english", "from_english", "both"] | None, PAIRS] = None
    """Direction of translation; the sides of a pair are swapped where the direction demands it. null: to_english for
    cldr, from `source_field` to `target_field` for other kinds."""

    max_number: Annotated[Count, CLDR] = 999
    """Largest number in a measure, price or relative time."""

    examples_per_language: Annotated[Count, CLDR] = 2000
    """Number of pairs of the first language; the n-th language has this number divided by n ** `power_law_exponent`."""

    min_examples_per_language: Annotated[Count, CLDR] = 100
    """Minimum number of pairs of a language under the power law."""

    power_law_exponent: Annotated[NotNegative, CLDR] = 0.0
    """Exponent of the power law by which the sizes of the languages fall; 0: all are equal."""

    path: Annotated[Place | None, READ] = None
    """A file, a directory of files, or a wildcard such as data/*.jsonl.gz; jsonl, csv, text and chat files may be
    gzipped. hub, text, chat, preferences, kto, rewards, classification, embeddings, prompts: id or
    directory of a data set. images: a directory that has a directory of images for each class, .parquet files, or the
    id of a data set. image_text: .parquet files, a directory of them, or the id of a data set. Required."""

    made_by: Annotated[Annotated[Text | None, MAY_CHANGE], ROW_KINDS] = None
    """Command that makes the file at `path`; an error names the command if the file is not there."""

    target_path: Annotated[Place | None, ("parallel",)] = None
    """Like `path`, for the files with the targets; required."""

    delimiter: Annotated[Annotated[str, Field(min_length=1, max_length=1)] | None, ("csv",)] = None
    """Character between values; null: a tab in .tsv files, which are read without quoting, otherwise a comma."""

    subset: Annotated[Text | list[Text] | dict[str, Any] | None, OF_THE_HUB] = None
    """Name of the subset, such as "{language}-en"; or a list of names, of which the first that exists is used, such as
    ["{language}-en", "en-{language}"]; or the name for each language, such as {de: de-en, zh: en-zh}. null: the data
    set has only one."""

    revision: Annotated[Text | None, OF_THE_HUB] = None
    """Branch, tag or commit; null: the main branch."""

    source_field: Annotated[Text, FIELDS] = "source"
    """Field that holds the source; translation.de is the field de inside translation."""

    target_field: Annotated[Text, FIELDS] = "target"
    """Field that holds the target."""

    language_field: Annotated[Text | None, FIELDS] = None
    """Field that holds the language; null: none does."""

    english: Annotated[Literal["source", "target"] | None, ROW_KINDS] = None
    """The side that is English, which `direction` needs. null: if only one side's field has {language} in it, the other
    side."""

    text_field: Annotated[Text, ("text", "classification", *IMAGE_TEXT)] = "text"
    """Field that holds a document, or the text to classify; in a .txt file each paragraph is a document."""

    images_per_row: Annotated[Count, IMAGE_TEXT] = 1
    """Number of images in a row that the planner assumes; a row may have another number."""

    image_field: Annotated[Text, IMAGES] = "image"
    """Field that holds an image."""

    image_size: Annotated[Count | None, IMAGES] = None
    """Rows and columns of pixels that the model reads; null: the size of the model's image processor or, for a new
    model, of its configuration."""

    augmentation: Annotated[dict[str, Any], IMAGES] = Field(default_factory=dict)
    """Transforms of training images by torchvision (`torchvision.transforms.v2`), in this order: the arguments of
    each, by its name, such as {RandomCrop: {size: 32, padding: 4}, RandomHorizontalFlip: {}}."""

    label_field: Annotated[Text, LABELLED] = "label"
    """Field that holds the label of a row: a name in `labels`, or the number of that name, counted from 0."""

    labels: Annotated[list[Text], LABELLED] = Field(default_factory=list)
    """Names of the classes in the order of the model's outputs, such as [negative, positive]. Required."""

    max_length: Annotated[int, Field(ge=2), ROW_LENGTH_KINDS] = 1024
    """Maximum length of a conversation, of a prompt with its answer, or of a single text, in tokens; longer rows are
    truncated. Rows that have no target left are dropped and counted. prompts: longer prompts are an error."""

    truncation_mode: Annotated[Literal["keep_start", "keep_end"], CHAT] = "keep_start"
    """Which end of a conversation that is too long is kept."""

    chat_template: Annotated[Place | None, MESSAGE_KINDS] = None
    """File with a Jinja chat template, which is used and saved in place of the tokenizer's own; null: the tokenizer's
    own."""

    assistant_only_loss: Annotated[bool, CHAT] = True
    """Whether only what the assistant says is learnt, or all tokens of a conversation."""

    completion_only_loss: Annotated[bool, (*CHAT, *IMAGE_TEXT)] = True
    """Where rows have a prompt and a completion: whether only completions are learnt, or prompts too."""

    split_by: Annotated[Literal["source", "target"], ROW_KINDS] = "source"
    """Pairs that are equal on this side go to the same split. A data set's own splits stay as they are."""

    skip_empty: Annotated[bool | None, ROW_KINDS] = None
    """Whether pairs without text on one side are skipped and counted, instead of an error; null: for parallel and hub
    only."""

    max_examples: Annotated[Count | None, READ] = None
    """Number of pairs, documents, conversations or images to sample before they are split; null: all."""

    max_held_out: Annotated[Count | None, ROW_KINDS] = None
    """Maximum number of pairs per language in validation, and in test; null: all, or 2000 with `streaming`."""

    streaming: Annotated[bool, ROW_KINDS] = False
    """Whether pairs are read during training, over and over, instead of all at once before it."""

    counts: Annotated[dict[str, Any] | None, ROW_KINDS] = None
    """With `streaming`: number of training pairs of each language, such as {de: 4500000, yo: 10000}, if the data do not
    have it; `temperature` needs it."""

    shuffle_buffer: Annotated[Count, ROW_KINDS] = 1000
    """With `streaming`: number of rows per language that are held in memory and shuffled at a time."""

    @property
    def length_key(self) -> str:
        """The key with the most tokens of a row, or of the target of a pair."""
        return "max_length" if uses(self.kind, ROW_LENGTH_KINDS) else "max_target_tokens"

    def model_post_init(self, context: Any, /) -> None:
        if self.validation_fraction + self.test_fraction >= 1:
            raise DataError(
                f"validation_fraction {self.validation_fraction} and test_fraction {self.test_fraction} leave nothing "
                "to train on; their sum must be below 1."
            )
        files = files_like(self.kind)
        if self.path is None and files in PATHS:
            raise DataError(f"path is missing and kind is {self.kind}; give {PATHS[files]}.")
        if self.kind == "parallel" and self.target_path is None:
            raise DataError(
                "target_path is missing and kind is parallel; give the file with the translations of the lines of path."
            )
        if self.kind == "cldr":
            self._check_cldr()
        if files in _FILES and self.subset is not None and not isinstance(self.subset, str):
            raise DataError(
                f"subset is {show(self.subset)} and kind is {self.kind}, which reads one subset; give its name."
            )
        for language, name in self.subset.items() if isinstance(self.subset, dict) else ():
            if not isinstance(name, str) or not name:
                raise DataError(f"subset.{language} is {show(name)}; give the name of a subset.")
        for language, code in self.language_codes.items():
            if not isinstance(code, str) or not code:
                raise DataError(
                    f"language_codes.{language} is {show(code)}; give the tokenizer's code, such as deu_Latn."
                )
        for language, number in (self.counts or {}).items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise DataError(
                    f"counts.{language} is {show(number)}; give the number of its pairs, a whole number of at least 1."
                )
        if self.streaming:
            why = "streaming is true, and a stream has no end to draw from; set it to false"
            refuse_given(self, ("max_examples",), why, DataError)
        elif self.kind in ROW_KINDS:
            why = "streaming is false: without it all pairs are counted and shuffled; set streaming"
            refuse_given(self, ("counts", "shuffle_buffer"), why, DataError)

    def _check_cldr(self) -> None:
        if not self.languages and self.num_languages is None:
            raise DataError("languages is empty; name some, such as [de, fr, es], or set num_languages.")
        if self.languages and self.num_languages is not None:
            raise DataError(
                f"languages names {len(self.languages)} languages and num_languages is {self.num_languages}; leave one "
                "of the two out."
            )
        if not self.power_law_exponent:
            why = "power_law_exponent is 0, so all languages have the same size; set that above 0"
            refuse_given(self, ("rank_seed",), why, DataError)
        if self.min_examples_per_language > self.examples_per_language:
            raise DataError(
                f"min_examples_per_language is {self.min_examples_per_language}, more than examples_per_language, "
                f"{self.examples_per_language}; lower the one or raise the other."
            )
