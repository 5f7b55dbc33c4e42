"""The experiments on the corpus of message catalogues: which runs each has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hf_gpipe.errors import UserError, nearest
from translation_scaling.runs import Run, check_run

_RECIPES = Path(__file__).parents[2] / "recipes" / "translation"

RATES = (1e-3, 2e-3, 4e-3)
SWEEP_STEPS = 1000
"""Updates of each run of the sweep of learning rates: the models begin to translate within them."""

FIXED_PASSES = 3
"""Passes of the runs that are compared with others at equal updates instead of at their ends."""

#: Target tokens of an update: a thousandth of the paper's.
BATCH_TOKENS = (4000, 1000, 260)
#: Updates that all sizes are compared at; the smaller ones are compared at the largest one's tokens too.
BATCH_UPDATES = 1500

#: The third of the recipe's languages that has the fewest pairs in the corpus of the default packages.
LOW = (
    *("he", "cy", "mai", "fy", "ga", "my", "ks", "brx", "xh", "gd", "sq", "nds", "be_Latn", "si", "or", "co", "wa"),
    *("az", "ps", "af", "ab", "kab", "hne", "ia", "mn", "am", "ie", "hy", "tt", "ff", "ku", "tg", "ky", "uz"),
)
#: The Romance languages of the corpus, and two made from them: from 33,000 pairs to a few hundred, many words alike.
RELATED = ("fr", "es", "ca", "it", "pt", "pt_BR", "gl", "ro", "oc", "ast", "an", "fur", "co", "wa", "ia", "ie")
#: Ten of them, from the fewest pairs to the most.
ALONE = ("ie", "ia", "wa", "co", "an", "fur", "ast", "oc", "ro", "fr")
#: Of each third three languages, apart in size and script.
BILINGUAL = ("fr", "ru", "ja", "ar", "ka", "id", "cy", "or", "mn")


@dataclass(frozen=True)
class Asked:
    """The options that all experiments share: training.seed, key=value, the folder of all runs, updates of a sweep."""

    seed: int
    overrides: Sequence[str]
    output: Path
    sweep_steps: int = SWEEP_STEPS

    def run(self, model: str, name: Sequence[str], *own: str, to_end: bool = False, sweep: Sequence[Run] = ()) -> Run:
        """A run of a recipe with overrides of its own; its name is of those words that are not empty."""
        recipe = _RECIPES / f"l10n-{model}.yaml"
        label = "-".join(word for word in name if word)
        return Run(recipe, self.seed, (*self.overrides, *own), self.output, label, to_end, tuple(sweep))

    def sweep(self, model: str, *own: str, label: str = "") -> list[Run]:
        """Short runs with each learning rate, decided by their losses: they need no model."""
        few = (f"training.max_steps={self.sweep_steps}", "training.decay_steps=0", "evaluation.max_examples=1")
        own = (*own, *few, "training.load_best_model_at_end=false")
        return [
            self.run(_shape(model), ("rate", label, model, f"{rate:g}"), *own, f"training.learning_rate={rate}")
            for rate in RATES
        ]

    def trained(self, model: str, *own: str, label: str = "", to_end: bool = True, has_own_sweep: bool = False) -> Run:
        """A run with the rate that the sweep of its model gives; `has_own_sweep`: with the run's own overrides."""
        of_model = _DEEPER if model == "deeper" else ()
        sweep = self.sweep(model, *of_model, *own, label=label) if has_own_sweep else self.sweep(model, *of_model)
        overrides = (*of_model, *(() if to_end else _CONSTANT), *own)
        return self.run(_shape(model), ("l10n", label, model), *overrides, to_end=to_end, sweep=sweep)

    def of_related(self, run: Run, tokens: int) -> Run:
        """A run of base with updates of so many tokens, with the rate that was swept for the related languages.

        With Adam the rate is to grow as the root of the size of a mini-batch (Malladi et al., arXiv 2205.10287).
        """
        sweep = tuple(self.sweep("base", *_RELATED, label="related"))
        return replace(run, sweep=sweep, rate_factor=round(math.sqrt(tokens / _RELATED_TOKENS), 4))


def _shape(model: str) -> str:
    return "deep" if model == "deeper" else model


#: The deep model with twice the layers has no recipe of its own.
_DEEPER = ("model.config.encoder_layers=16", "model.config.decoder_layers=16")
_CONSTANT = (f"training.num_train_epochs={FIXED_PASSES}", "training.decay_steps=0")
#: The related languages, and with the mini-batches of their sweep.
_OF_RELATED = (f"data.languages=[{', '.join(RELATED)}]", "tokenizer.vocab_size=4000")
_RELATED_TOKENS = 2000
_RELATED = (*_OF_RELATED, f"training.batch_tokens={_RELATED_TOKENS}")
#: One language: a thousand pairs yield little more than 2,000 different tokens.
_OF_ONE = "tokenizer.vocab_size=2000"
MODELS = ("base", "deep", "wide")


def _every(steps: int) -> tuple[str, str]:
    """Evaluations and checkpoints: the end is found only if the last tenth of the updates has one."""
    return f"training.eval_steps={steps}", f"training.save_steps={steps}"


def _batch(asked: Asked) -> list[Run]:
    """Each size with as many updates as the largest, and with as many tokens."""
    updates = {(tokens, BATCH_UPDATES * of // tokens) for tokens in BATCH_TOKENS for of in (tokens, max(BATCH_TOKENS))}
    runs = []
    for tokens, count in sorted(updates, key=lambda entry: (-entry[1] * entry[0], -entry[0])):
        own = (f"training.batch_tokens={tokens}", f"training.max_steps={count}", f"training.decay_steps={count // 5}")
        words = ("l10n", "batch", str(tokens), str(count), "base")
        run = asked.run("base", words, *_OF_RELATED, *own, *_every(max(100, count // 30)))
        runs.append(asked.of_related(run, tokens))
    return runs


def _stability(asked: Asked) -> list[Run]:
    scaled, clipped = "model.depth_scaled_feed_forward=true", "training.logit_clipping=20.0"
    ways = {"plain": (), "scaled": (scaled,), "clipped": (clipped,), "scaled-clipped": (scaled, clipped)}
    return [asked.trained("deep", *own, label=label, to_end=False) for label, own in ways.items()]


def _bilingual(asked: Asked) -> list[Run]:
    own = (_OF_ONE, "training.batch_tokens=1000", *_every(10))
    return [asked.trained("base", f"data.languages=[{code}]", *own, label=f"only-{code}") for code in BILINGUAL]


def _low(asked: Asked) -> list[Run]:
    own = (f"data.languages=[{', '.join(LOW)}]", *_every(25))
    return [asked.trained(model, *own, label="low") for model in MODELS]


def _alone(asked: Asked) -> list[Run]:
    own = (_OF_ONE, "training.batch_tokens=1000", "training.warmup_steps=100", *_every(50))
    runs = [
        asked.run("base", ("l10n", "alone", code, "base"), f"data.languages=[{code}]", *own, to_end=True)
        for code in ALONE
    ]
    return [asked.of_related(run, 1000) for run in runs]


class Experiment(NamedTuple):
    """Some runs that answer a question.

    Attributes:
        name: on the command line.
        question: in a few words.
        runs: its runs, in order.
        compares: whether its runs are trained and tested on the same pairs, so that the report can compare them.
        baselines: the experiment with models of one language, which its report compares them with; None: there is none.
    """

    name: str
    question: str
    runs: Callable[[Asked], list[Run]]
    compares: bool = True
    baselines: str | None = None


EXPERIMENTS = (
    Experiment(
        "rates",
        "which learning rate each model learns fastest with",
        lambda asked: [run for model in MODELS for run in asked.sweep(model)],
        compares=False,
    ),
    Experiment(
        "main",
        "base, deep and wide, each to its end",
        lambda asked: [asked.trained(model) for model in MODELS],
        baselines="bilingual",
    ),
    Experiment("batch", "260, 1000 and 4000 target tokens an update, on the related languages", _batch),
    Experiment("stability", "scaled feed-forward initialisation and clipped logits, on and off", _stability),
    Experiment(
        "temperature",
        "T = 1, 5 and 100",
        lambda asked: [
            asked.trained("deep", f"data.temperature={t}", label=f"T-{t}", to_end=False) for t in (1, 5, 100)
        ],
    ),
    Experiment(
        "deeper",
        "twice the layers of deep",
        lambda asked: [asked.trained(model) for model in ("base", "deep", "deeper")],
    ),
    Experiment("low", "the languages with the fewest pairs alone", _low),
    Experiment(
        "related",
        "sixteen related languages alone, which share much",
        lambda asked: [asked.trained(model, *_RELATED, label="related", has_own_sweep=True) for model in MODELS],
        baselines="alone",
    ),
    Experiment("alone", "ten of the related languages, each one alone", _alone, compares=False),
    Experiment("bilingual", "one language alone, for nine languages", _bilingual, compares=False),
)


def experiment(name: str) -> Experiment:
    """The experiment with this name. Raises UserError if there is none."""
    names = [known.name for known in EXPERIMENTS]
    if name not in names:
        raise UserError(
            f"{name!r} is neither a recipe (.yaml) nor an experiment{nearest(name, names)}; the experiments are "
            f"{', '.join(names)}"
        )
    return EXPERIMENTS[names.index(name)]


def plan_experiments(names: Sequence[str], asked: Sequence[Asked]) -> list[Run]:
    """The runs of experiments in order, each one once, and before it the sweep of learning rates that it needs.

    Args:
        names: of the experiments.
        asked: for each seed.
    """
    runs: dict[tuple[str, int], Run] = {}
    for run in (run for of_seed in asked for name in names for run in experiment(name).runs(of_seed)):
        for member in (*run.sweep, run):
            runs.setdefault(member.key, member)
    for run in runs.values():
        check_run(run)
    return list(runs.values())
