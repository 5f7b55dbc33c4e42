"""The files of sentence-transformers beside a model: how hidden states become embeddings, and how texts are cut."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hf_gpipe import strict_json
from hf_gpipe.checkpoint.weight_files import optional_file
from hf_gpipe.errors import UnsupportedModelError, UserError, listed

_MODULES = "modules.json"
_TRANSFORMER, PROMPTS_FILE, _POOLING = "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling"
#: sentence-transformers' older names of the poolings, which all of its versions read.
_OLDER = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_SUPPORTED = ("mean", "cls", "lasttoken")


@dataclass(frozen=True)
class SentenceFiles:
    """The settings that the files of sentence-transformers have for a model.

    Attributes:
        pooling: "mean", "cls" or "lasttoken"; None: they say nothing.
        normalizes: whether embeddings are divided by their length.
        max_length: the tokens to which a text is cut; None: the files do not say it.
        lowers_case: whether texts are lowercased before they are tokenised.
        contents: the contents of the files that are saved with the model as they are, by their names.
    """

    pooling: str | None = None
    normalizes: bool = False
    max_length: int | None = None
    lowers_case: bool = False
    contents: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str | os.PathLike[str] | None) -> SentenceFiles:
        """Read the files of a Hub id or directory; of one without them everything is open.

        Raises:
            UserError: the model has a module, or a pooling, that is not supported.
            CheckpointError: a file cannot be read.
        """
        modules = _read(source, _MODULES, list) if source else None
        if modules is None:
            return cls()
        assert source is not None
        kinds = [str(module.get("type")).rpartition(".")[2] if isinstance(module, dict) else "" for module in modules]
        if kinds not in (["Transformer"], ["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            odd = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")] or kinds
            raise UnsupportedModelError(
                f"{_MODULES} of {str(source)!r} has {listed(odd)}; a model of sentence-transformers is supported that "
                "is a Transformer, a Pooling and perhaps a Normalize"
            )
        paths = [str(module.get("path") or "") for module in modules]
        if any(PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts for path in paths):
            raise UserError(f"{_MODULES} of {str(source)!r} names {listed(paths)}, expected folders inside of it")
        if paths[0]:
            raise UnsupportedModelError(f"the Transformer of {str(source)!r} is in {paths[0]!r}; give that directory")
        transformer = _read(source, _TRANSFORMER, dict) or {}
        pooling = _read(source, f"{paths[1]}/config.json", dict) or {} if len(kinds) > 1 else {}
        contents = {_TRANSFORMER: transformer, f"{_POOLING}/config.json": pooling}
        contents[PROMPTS_FILE] = _read(source, PROMPTS_FILE, dict) or {}
        longest = transformer.get("max_seq_length")
        return cls(
            _pooling_of(source, pooling) if len(kinds) > 1 else None,
            "Normalize" in kinds,
            longest if isinstance(longest, int) else None,
            bool(transformer.get("do_lower_case")),
            contents,
        )

    def check_prompts(self) -> None:
        """Raise UnsupportedModelError where an embedding is to be that of a text without its prompt."""
        if self.contents.get(f"{_POOLING}/config.json", {}).get("include_prompt") is False:
            raise UnsupportedModelError(
                "prompts: the model's Pooling leaves the tokens of prompts out (include_prompt is false), which is not "
                "supported; leave prompts out"
            )

    def write(self, folder: Path, *, width: int, pooling: str, normalizes: bool, max_length: int | None) -> None:
        """Write the files, by which sentence-transformers loads the model.

        Args:
            folder: of the model.
            width: D, the number of entries of an embedding.
            pooling, normalizes, max_length: as they were in the training.
        """
        kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
        own = {name: dict(content) for name, content in self.contents.items()}
        of_pooling = own.get(f"{_POOLING}/config.json", {})
        for name in ("pooling_mode", "embedding_dimension", *_OLDER.values()):
            of_pooling.pop(name, None)
        poolings = {older: name == pooling for name, older in _OLDER.items()}
        contents: dict[str, Any] = {
            _MODULES: [
                {
                    "idx": number,
                    "name": str(number),
                    "path": f"{number}_{kind}" if number else "",
                    "type": f"sentence_transformers.models.{kind}",
                }
                for number, kind in enumerate(kinds)
            ],
            _TRANSFORMER: {"do_lower_case": False} | own.get(_TRANSFORMER, {}) | {"max_seq_length": max_length},
            PROMPTS_FILE: {"prompts": {}, "similarity_fn_name": "cosine"} | own.get(PROMPTS_FILE, {}),
            f"{_POOLING}/config.json": {"word_embedding_dimension": width} | poolings | of_pooling,
        }
        for name, content in contents.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if normalizes:
            (folder / "2_Normalize").mkdir(exist_ok=True)


def _read(source: str | os.PathLike[str], name: str, kind: type) -> Any:
    """The content of a JSON file; None: there is none."""
    file = optional_file(source, name, offline=True)
    return None if file is None else strict_json.read(file, kind, allows_nan=True)


def _pooling_of(source: str | os.PathLike[str], config: Mapping[str, Any]) -> str:
    """The pooling's name. Raises UnsupportedModelError for several, or another than those that are supported."""
    given = config.get("pooling_mode")
    names = [given] if isinstance(given, str) else list(given or ())
    names = names or [name for name, older in _OLDER.items() if config.get(older)] or ["mean"]
    if len(names) > 1 or names[0] not in _SUPPORTED:
        raise UnsupportedModelError(
            f"the Pooling of {str(source)!r} is {listed(list(map(str, names)))}; one of {', '.join(_SUPPORTED)} is "
            "supported"
        )
    return str(names[0])
