"""Tries every causal and sequence-to-sequence architecture of transformers in stages; the tables of docs/families.md.

    python scripts/families.py                  all of them, docs/families.md is written
    python scripts/families.py llama t5         these only, nothing is written
    python scripts/families.py --check          all, and whether hf_gpipe/adapters/families.py says the same

A tiny model of the architecture's default configuration, in 3 stages and in one stage a layer, with 2 micro-batches,
is compared with the plain model (hf_gpipe/pipeline/exactness.py), a mixture of experts that has an auxiliary loss
with and without that loss. Options that not every family has, such as rows in chunks, are compared in the same way.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.families import EXACT, REFUSED, UNREAD
from hf_gpipe.adapters.image_text import FORMS
from hf_gpipe.adapters.observation.tiny import tiny_config
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.errors import UnsupportedModelError, UserError
from hf_gpipe.losses.loss import PLAIN
from hf_gpipe.model.clone import turn_randomness_off
from hf_gpipe.modes.chunks.check import check, verify
from hf_gpipe.modes.tensor_parallel.check import divided
from hf_gpipe.pipeline.exactness import CloneError, compare
from hf_gpipe.pipeline.probe import PROBE
from hf_gpipe.planner.costs.layers import ModelLayers
from hf_gpipe.settings.division import Division
from hf_gpipe.settings.pipeline import PipelineConfig

REPORT = Path(__file__).parents[1] / "docs" / "families.md"

#: What every checkpoint of a family has in its configuration and the default configuration lacks.
MISSING_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}

#: The refused architectures that the comparison finds exact, because its mini-batches have the decoder's inputs.
UNSEEN = ("encoder-decoder",)


class Row(NamedTuple):
    """One line of the report.

    Attributes:
        name: the architecture.
        model_class: the model's class.
        verdict: "exact", "not supported" or "not built".
        detail: the difference or the reason.
        options: of an exact one, for each of `_OPTIONS` "yes", another word, or nothing.
    """

    name: str
    model_class: str
    verdict: str
    detail: str
    options: tuple[str, ...] = ()


def architectures() -> dict[str, str]:
    """Model type -> name of its class, of transformers' causal and sequence-to-sequence auto mappings, and `FORMS`."""
    classes = {}
    of_images = {name: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name] for name in FORMS}
    for mapping in (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, of_images):
        for name, model_class in mapping.items():
            classes.setdefault(name, model_class if isinstance(model_class, str) else model_class[0])
    return dict(sorted(classes.items()))


def default_config(name: str) -> PreTrainedConfig:
    """The default configuration of a family, completed where no model can be built from it."""
    return CONFIG_MAPPING[name](**MISSING_DEFAULTS.get(name, {}))


def variants(name: str) -> Iterator[PreTrainedConfig]:
    """The default configuration, and for a mixture of experts the same with its auxiliary loss."""
    config = default_config(name)
    if getattr(config, "output_router_logits", None):
        config.output_router_logits = False
    yield config
    has_loss = hasattr(config, "output_router_logits") and getattr(config, "router_aux_loss_coef", 0)
    if has_loss and not config.is_encoder_decoder:
        config = default_config(name)
        config.output_router_logits = True
        yield config


def examine(name: str, model_class: str) -> Row:
    """Build a tiny model of a family and compare it with its stages."""
    try:
        is_known = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or name in FORMS
        if not is_known and not default_config(name).is_encoder_decoder:
            return Row(name, model_class, "not built", "not a causal or sequence-to-sequence model of text alone")
        if name in UNSEEN:
            return Row(name, model_class, "not supported", REFUSED[name])
        differences = []
        for config in variants(name):
            comparison = compare(config)
            if not comparison.is_exact:
                return Row(name, model_class, "not supported", REFUSED.get(name, str(comparison)))
            differences.append(comparison.difference)
        precision = ""
        if comparison.dtype == torch.float32:
            precision = ", in float32: the plain model fails in float64"
        elif comparison.loss_dtype == torch.float32:
            precision = ", with a tolerance of 1e-6: its logits are float32"
        losses = ", also with the auxiliary loss" if len(differences) > 1 else ""
        options = tuple(_verified(check, next(variants(name))) for check in _OPTIONS.values())
        return Row(name, model_class, "exact", f"{max(differences):.1e}{precision}{losses}", options)
    except CloneError as error:
        return Row(name, model_class, "not built", _one_line(error, name))
    except UnsupportedModelError as error:
        return Row(name, model_class, "not supported", REFUSED.get(name, _one_line(error, name)))
    except Exception as error:  # the default configuration itself
        return Row(name, model_class, "not built", f"the default configuration fails: {_one_line(error, '')}")


def _verified(check: Callable[[TextAdapter], str | None], config: PreTrainedConfig) -> str:
    """The word of the report on a family and an option; nothing where a tiny clone is not exact with it."""
    tiny = tiny_config(config)
    turn_randomness_off(tiny)
    try:
        return check(adapter_for(tiny)) or "yes"
    except UserError:
        return ""


def _divided(adapter: TextAdapter) -> str:
    """The share of the parameters that each of two ranks has."""
    PROBE.require(adapter, divided(adapter, 2))
    layers = (ModelLayers(adapter, Division(size)) for size in (1, 2))
    whole, part = (sum(parameters.count for parameters in own.sizes.values()) for own in layers)
    return f"{part / whole:.2f}"


def _in_chunks(adapter: TextAdapter, *, packing: bool = False) -> None:
    config = PipelineConfig(sequence_chunks=2)
    check(config, adapter, PLAIN, packing=packing, probe=PROBE)
    verify(config, adapter, packing=packing, probe=PROBE)


#: The options that not every exact family has, and what compares a tiny clone with and without.
_OPTIONS: dict[str, Callable[[TextAdapter], str | None]] = {
    "in chunks": _in_chunks,
    "packed, in chunks": partial(_in_chunks, packing=True),
    "divided": _divided,
}


def _one_line(error: Exception, name: str) -> str:
    text = " ".join(str(error).split())
    return (text if len(text) <= 160 else f"{text[:157]}...").removeprefix(f"{name}: ")


def write_report(rows: Sequence[Row]) -> None:
    """Write the tables of docs/families.md."""
    from pages import block, write

    groups = {verdict: [row for row in rows if row.verdict == verdict] for verdict in _COLUMNS}
    counts = ", ".join(f"{len(own)} {verdict}" for verdict, own in groups.items())
    yes = [sum(bool(row.options[number]) for row in groups["exact"]) for number in range(len(_OPTIONS))]
    counts += "; of the exact ones " + ", ".join(
        f"{count} {option!r}" for count, option in zip(yes, _OPTIONS, strict=True)
    )
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    # Those that read images have a table of their own.
    groups["images and text"] = [row for row in groups["exact"] if row.name in FORMS]
    groups["exact"] = [row for row in groups["exact"] if row.name not in FORMS]
    parts = {name: _table(name, own) for name, own in groups.items()}
    parts["summary"] = fill(f"{versions}: {len(rows)} architectures, {counts}.", 100)
    unread = [f"| {name} | {reason} |" for name, reason in sorted(UNREAD.items())]
    parts["images are not read"] = "\n".join(["| images are not read | reason |", "|---|---|", *unread])
    write(REPORT, {name: block(text) for name, text in parts.items()})


def _table(name: str, rows: Sequence[Row]) -> str:
    columns = ["architecture", "class", _COLUMNS.get(name, _COLUMNS["exact"])]
    columns += [] if name in ("not supported", "not built") else _OPTIONS
    cells = [[row.name, row.model_class, row.detail.replace("|", "/"), *row.options] for row in rows]
    lines = (" | ".join(own) for own in (columns, *cells))
    head, *others = (f"| {line} |" for line in lines)
    return "\n".join([head, "|---" * len(columns) + "|", *others])


#: The verdicts, in the order of the page, and what the table of each tells.
_COLUMNS = {"exact": "largest difference", "not supported": "reason", "not built": "reason"}


def disagreements(rows: Sequence[Row]) -> list[str]:
    """Where hf_gpipe/adapters/families.py says something else, one line each.

    A family of which no tiny model can be built says nothing: some releases of transformers cannot run some families.
    """
    complaints = []
    for row in rows:
        if row.verdict == "exact" and row.name not in EXACT:
            complaints.append(f"{row.name} is exact and does not stand in EXACT")
        if row.verdict == "not supported" and row.name in EXACT:
            complaints.append(f"{row.name} stands in EXACT and is not: {row.detail}")
        if row.name in REFUSED and row.verdict == "exact":
            complaints.append(f"{row.name} is exact and stands in REFUSED")
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="architecture")
    parser.add_argument("--check", action="store_true", help="compare with hf_gpipe/adapters/families.py; exit code 1")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    known = architectures()
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"not in transformers' causal or sequence-to-sequence mappings: {', '.join(unknown)}")
    rows = []
    for name in arguments.names or known:
        start = time.perf_counter()
        rows.append(examine(name, known[name]))
        seconds = time.perf_counter() - start
        print(f"{name:28} {rows[-1].verdict:14} {rows[-1].detail} ({seconds:.1f} s)", flush=True)
    if not arguments.names and not arguments.check:
        write_report(rows)
    complaints = disagreements(rows) if arguments.check else []
    print(*complaints, sep="\n", end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
