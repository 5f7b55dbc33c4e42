"""Trains a SentencePiece tokenizer and saves it so that plain transformers loads it; what identifies a tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_gpipe import strict_json
from hf_gpipe.data.prepared import cached, fingerprint
from hf_gpipe.data.splits import MAX_TOKENIZER_EXAMPLES, Corpus
from hf_gpipe.errors import DataError, nearest
from hf_gpipe.progress import progress
from hf_gpipe.recipe import TokenizerSection
from hf_gpipe.sources import is_here

PAD, EOS, UNK, BOS = "<pad>", "</s>", "<unk>", "<s>"
SPECIAL_TOKENS = (PAD, EOS, UNK, BOS)  # their ids are 0, 1, 2, 3
MODELS = ("unigram", "bpe")
SPACE = "\u2581"  # SentencePiece's visible space
#: Patterns of the files that make a tokenizer, and of those that only go with one.
_VOCABULARIES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.spm", "*.tiktoken", "tekken.json")
_BESIDE_VOCABULARIES = ("special_tokens_map.json", "added_tokens.json", "chat_template*", "*_chat_templates/*")


def has_tokenizer(directory: str | Path) -> bool:
    """Whether a directory has files of a tokenizer."""
    return any(_matching(directory, _VOCABULARIES))


def tokenizer_files(directory: str | Path) -> list[Path]:
    """The files of a tokenizer in a directory, those of its chat templates included."""
    return sorted({*_matching(directory, (*_VOCABULARIES, *_BESIDE_VOCABULARIES))})


def _matching(directory: str | Path, patterns: Sequence[str]) -> Iterator[Path]:
    return (path for pattern in patterns for path in Path(directory).glob(pattern) if path.is_file())


def read_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hub id or directory. Raises DataError where there is none that can be read."""
    try:
        is_here(source)
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(source), trust_remote_code=trust_remote_code
        )
        if not isinstance(longest := loaded.model_max_length, int | float):  # the library finds it at a long text
            raise ValueError(f"model_max_length is {longest!r}, expected a number")
    except Exception as error:  # of a broken file, the library raises whatever its reading comes upon
        raise DataError(f"there is no tokenizer that can be read in {str(source)!r}: {error}") from error
    return loaded


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    directory: str | Path,
    *,
    model: str = "unigram",
    character_coverage: float = 1.0,
    target_tags: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Trains on `texts`, saves into `directory` and returns what AutoTokenizer.from_pretrained(directory) loads.

    The vocabulary has exactly `vocab_size` tokens: <pad>, </s>, <unk>, <s> (ids 0 to 3), the `target_tags`, the 256
    bytes and the learnt pieces, of which none crosses a space or joins two digits. Text is not normalised, and what
    the vocabulary lacks is spelt in bytes, so decoding gives back every text exactly. Two things are not text: a
    special token spelt out, which is read as that token, and SentencePiece's own sign for a space, U+2581, which comes
    back as a space. Every text ends in </s>.

    The result depends on the texts, their order and the arguments alone. Raises DataError when the texts cannot fill
    `vocab_size` or `vocab_size` cannot hold their characters; the message says which number would do.
    """
    if model not in MODELS:
        raise DataError(
            f"tokenizer model {model!r} is unknown{nearest(model, MODELS)}; choose from {', '.join(MODELS)}"
        )
    processor = _train(texts, vocab_size, model, character_coverage, target_tags)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_convert(processor, model, target_tags),
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        bos_token=BOS,
        additional_special_tokens=[_tag_token(tag) for tag in target_tags],
        # Encoder-decoder models take no token_type_ids, which fast tokenizers return unless told otherwise.
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(directory)
    return tokenizer


def trained_tokenizer(corpus: Corpus[Any], section: TokenizerSection) -> PreTrainedTokenizerFast:
    """The tokenizer that a recipe wants trained on a corpus; the cache keeps it for the next run on the same corpus."""

    def train(to: Path) -> None:
        train_tokenizer(
            corpus.texts(section.training_pairs),
            section.vocab_size,
            to,
            model=section.model,
            character_coverage=section.character_coverage,
            target_tags=corpus.target_tags,
        )

    made_of: str | None = getattr(corpus.train, "fingerprint", None)
    if made_of is None:
        with tempfile.TemporaryDirectory() as folder:
            train(Path(folder))
            return PreTrainedTokenizerFast.from_pretrained(folder)
    most = section.training_pairs or MAX_TOKENIZER_EXAMPLES
    options = [most, section.vocab_size, section.model, section.character_coverage]
    versions = [sentencepiece.__version__, tokenizers.__version__, transformers.__version__]
    key = fingerprint("tokenizer", made_of, options, list(corpus.target_tags), versions)
    return PreTrainedTokenizerFast.from_pretrained(cached("tokenizer", key, train))


def _train(
    texts: Iterable[str], vocab_size: int, model: str, character_coverage: float, target_tags: Sequence[str]
) -> sentencepiece.SentencePieceProcessor:
    """Train in a process of its own: for millions of texts SentencePiece takes gigabytes, and does not return them."""
    with tempfile.TemporaryDirectory() as folder:
        trained = Path(folder) / "model"
        options = {
            "vocab_size": vocab_size,
            "model_type": model,
            "character_coverage": character_coverage,
            "user_defined_symbols": list(target_tags),
        }
        error = _run_trainer(texts, [json.dumps(options), str(trained)])
        if error is not None:
            raise DataError(_explain(error, vocab_size))
        return sentencepiece.SentencePieceProcessor(model_proto=trained.read_bytes())


def _run_trainer(texts: Iterable[str], arguments: list[str]) -> str | None:
    """Give the texts to the process that trains, and wait for its end; its error, if there is one."""
    command = [sys.executable, str(Path(__file__).with_name("train_sentencepiece.py")), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        with progress(None, "training the tokenizer", layout="{desc}: {elapsed}") as shown:
            # A process that has ended with an error takes no more texts.
            with suppress(BrokenPipeError), process.stdin as pipe:
                for text in texts:
                    pipe.write(json.dumps(text).encode() + b"\n")
                    shown.update()
            while True:
                try:
                    process.wait(0.5)
                    break
                except subprocess.TimeoutExpired:
                    shown.update()
        message = process.stderr.read().decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    return None if process.returncode == 0 else message or f"its process ended with code {process.returncode}"


def _explain(message: str, vocab_size: int) -> str:
    """Says what SentencePiece's message means for the user, with both numbers."""
    if too_large := re.search(r"value <= (\d+)", message):
        return (
            f"tokenizer vocab_size is {vocab_size}, but the training texts yield at most {too_large[1]} tokens; "
            f"set vocab_size to {too_large[1]} or less, or train on more text"
        )
    if too_small := re.search(r"required_chars\. (\d+) vs (\d+)", message):
        return (
            f"tokenizer vocab_size is {vocab_size}, but the special tokens, the bytes and the characters of the texts "
            f"need {too_small[2]}; raise vocab_size, or lower character_coverage to spell rare characters in bytes"
        )
    if "sentences_.empty()" in message:
        return "the tokenizer has no text to train on; the training split is empty"
    return f"SentencePiece cannot train a vocabulary of {vocab_size} tokens: {message.strip()}"


def _convert(processor: sentencepiece.SentencePieceProcessor, model: str, target_tags: Sequence[str]) -> Tokenizer:
    """The same tokenizer for the `tokenizers` library, whose file transformers loads without any code of ours."""
    pieces = [processor.id_to_piece(index) for index in range(processor.vocab_size())]
    if model == "unigram":
        scores = [processor.get_score(index) for index in range(processor.vocab_size())]
        converted = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=2, byte_fallback=True))
    else:
        vocabulary = {piece: index for index, piece in enumerate(pieces)}
        converted = Tokenizer(
            models.BPE(vocabulary, _merges(processor, vocabulary), unk_token=UNK, fuse_unk=True, byte_fallback=True)
        )
    # Spaces become visible, and one more in front lets a word be the same piece at the start and after a space.
    converted.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    # Text that spells the name of a byte token, "<0x41>", is not that byte.
    converted.pre_tokenizer = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "isolated")
    converted.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    converted.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    converted.add_special_tokens([_tag_token(tag) for tag in target_tags])
    converted.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, pieces.index(EOS))]
    )
    return converted


def _tag_token(tag: str) -> AddedToken:
    # The tag swallows the space behind it, because the text behind gets one in front.
    return AddedToken(tag, rstrip=True, normalized=False, special=True)


def _merges(processor: sentencepiece.SentencePieceProcessor, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of a BPE model in order of rank: every way to make a learnt piece from two others, best piece first.

    SentencePiece keeps only the pieces; the order of their ids is the order in which they were learnt.
    """
    learnt = [
        piece
        for piece, index in vocabulary.items()
        if not (processor.is_control(index) or processor.is_unknown(index) or processor.is_byte(index))
    ]
    known = set(learnt)
    return [
        (piece[:cut], piece[cut:])
        for piece in learnt
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]


def identity_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all that decides which ids a text has."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        content = [[path.name, _content(path)] for path in files]
    # What is set on the object and not saved: the languages of a multilingual tokenizer.
    languages = [getattr(tokenizer, name, None) for name in ("src_lang", "tgt_lang")]
    versions = [tokenizers.__version__, transformers.__version__]
    return fingerprint(type(tokenizer).__qualname__, content, languages, versions)


def _content(path: Path) -> Any:
    if path.suffix != ".json":
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    content = strict_json.read(path, error=DataError, allows_nan=True)
    if isinstance(content, dict):
        # The last truncation and padding, and the path that it was loaded from, do not belong to its identity.
        for name in ("truncation", "padding", "name_or_path", "is_local", "local_files_only"):
            content.pop(name, None)
    return content
