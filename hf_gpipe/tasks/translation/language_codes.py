"""Languages of tokenizers that have codes of their own, as those of NLLB, M2M-100, mBART and PLBart.

Such a tokenizer puts a token of the language around a text, in place of a tag in front of the source.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_gpipe.adapters.text_entries import token_ids
from hf_gpipe.errors import DataError, listed


class LanguageCodes:
    """The codes of a tokenizer, and how the data's languages map to them.

    Args:
        tokenizer: has codes; see `of`.
        given: codes of languages that the tokenizer calls otherwise (`data.language_codes`).
    """

    def __init__(self, tokenizer: Any, given: Mapping[str, str]) -> None:
        self._tokenizer, self._given = tokenizer, given
        known = dict(getattr(tokenizer, "lang_code_to_id", None) or {})
        if not known:  # of NLLB: its special tokens besides those of every tokenizer
            named = {tokenizer.special_tokens_map.get(name) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
            known = {
                token.content: id_
                for id_, token in tokenizer.added_tokens_decoder.items()
                if token.special and token.content not in named
            }
        #: The token of each code. PLBart's tokenizer calls them "__java__", and knows "java" too.
        self.ids: dict[str, int] = {code.strip("_"): id_ for code, id_ in known.items()}

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, given: Mapping[str, str]) -> LanguageCodes | None:
        """The codes of a tokenizer; None: it has none. Raises DataError where codes are given for one without."""
        if hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "set_tgt_lang_special_tokens"):
            return cls(tokenizer, given)
        if given:
            raise DataError(
                f"data.language_codes: {type(tokenizer).__name__} has no codes of languages; leave language_codes out"
            )
        return None

    def code(self, language: str) -> str:
        """The tokenizer's code of a language of the data. Raises DataError where there is none, or it is not known."""
        if not language:
            raise DataError(
                "the tokenizer has codes of languages, and the data do not say which languages the sides have; set "
                "data.english to the side of one language in all rows and data.languages to the other, and give "
                "data.language_codes a code for each, with en for the side that data.english names"
            )
        code = self._given.get(language, language)
        if code.strip("_") not in self.ids:
            near = difflib.get_close_matches(code, self.ids, n=5, cutoff=0.3)
            near += [own for own in self.ids if own[:2] == code[:2] and own not in near]
            raise DataError(
                f"data.language_codes: the tokenizer has no language {code!r}; give its code, as {{{language}: "
                f"{near[0] if near else next(iter(self.ids))}}}; codes near it are {listed(near) or 'none'}, and all "
                f"are {listed(list(self.ids), 8)}"
            )
        return code

    def side(self, name: str, language: str) -> AbstractContextManager[None]:
        """Context manager in which texts of a side, "src_lang" or "tgt_lang", are of a language."""
        return self._spoken(name, self.code(language))

    @contextmanager
    def _spoken(self, name: str, code: str) -> Iterator[None]:
        before = getattr(self._tokenizer, name)
        setattr(self._tokenizer, name, code)
        try:
            yield
        finally:
            setattr(self._tokenizer, name, before)

    @cached_property
    def start_argument(self) -> str:
        """The argument of `generate` that takes the token of the target's language.

        mBART's and PLBart's targets end with this token, which then is the first that the decoder reads.
        """
        code, own = next(iter(self.ids.items()))
        with self._spoken("tgt_lang", code):
            first = token_ids(self._tokenizer(text_target=""))[0]
        return "forced_bos_token_id" if first == own else "decoder_start_token_id"

    def starting(self, language: str) -> dict[str, int]:
        """The argument of `generate` by which a model begins in a language."""
        return {self.start_argument: self.ids[self.code(language).strip("_")]}

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The texts of generated tokens, without those of languages, which not every tokenizer counts as special."""
        of_languages = {*self.ids.values()}
        kept = [[token for token in map(int, row) if token not in of_languages] for row in rows]
        texts: list[str] = self._tokenizer.batch_decode(kept, skip_special_tokens=True)
        return texts
