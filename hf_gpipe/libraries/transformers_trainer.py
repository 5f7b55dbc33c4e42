"""The private and undocumented names of transformers' Trainer."""

from __future__ import annotations

from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks as get_reporting_integration_callbacks
from transformers.modelcard import TrainingSummary as TrainingSummary  # what a model card says of a training
from transformers.optimization import AdafactorSchedule as AdafactorSchedule  # the learning rate Adafactor chose
from transformers.trainer_callback import CallbackHandler as CallbackHandler  # calls a list of callbacks
from transformers.trainer_callback import ExportableState as ExportableState  # a callback with a state to save
from transformers.trainer_pt_utils import AcceleratorConfig as AcceleratorConfig
from transformers.trainer_pt_utils import metrics_format as metrics_format  # metrics as text for people
from transformers.trainer_pt_utils import save_metrics as save_metrics  # writes all_results.json and its like
from transformers.trainer_pt_utils import save_state as save_state  # writes trainer_state.json
from transformers.trainer_utils import HubStrategy as HubStrategy
from transformers.trainer_utils import IntervalStrategy as IntervalStrategy
from transformers.trainer_utils import PredictionOutput as PredictionOutput
from transformers.trainer_utils import SaveStrategy as SaveStrategy
from transformers.trainer_utils import TrainOutput as TrainOutput
from transformers.trainer_utils import denumpify_detensorize as denumpify_detensorize  # arrays as Python's numbers
from transformers.trainer_utils import speed_metrics as speed_metrics  # runtime, rows and steps in a second
from transformers.training_args import ParallelMode as ParallelMode

#: The fields of TrainingArguments that a command line gives as JSON.
FIELDS_OF_JSON: tuple[str, ...] = tuple(TrainingArguments._VALID_DICT_FIELDS)
