"""Trains a SentencePiece tokenizer and saves it so that plain transformers loads it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_gpipe.errors import DataError, nearest

PAD, EOS, UNK, BOS = "<pad>", "</s>", "<unk>", "<s>"
SPECIAL_TOKENS = (PAD, EOS, UNK, BOS)  # their ids are 0, 1, 2, 3
MODELS = ("unigram", "bpe")
SPACE = "\u2581"  # SentencePiece's visible space


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


def _train(
    texts: Iterable[str], vocab_size: int, model: str, character_coverage: float, target_tags: Sequence[str]
) -> sentencepiece.SentencePieceProcessor:
    trained = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=trained,
            vocab_size=vocab_size,
            model_type=model,
            character_coverage=character_coverage,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            byte_fallback=True,
            split_digits=True,
            user_defined_symbols=list(target_tags),
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=3,
            pad_piece=PAD,
            eos_piece=EOS,
            unk_piece=UNK,
            bos_piece=BOS,
            # Sums of floats depend on how they are shared out, so the number of threads is part of the result.
            num_threads=4,
            # Longer texts would be left out without a word; this is as long as SentencePiece allows.
            max_sentence_length=2**30,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(_explain(str(error), vocab_size)) from error
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


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
    # A text that spells the name of a byte token, "<0x41>", is no such byte.
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
