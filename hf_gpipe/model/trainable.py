"""Which parameters and layers are trained, over all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.errors import UserError
from hf_gpipe.job.world import World
from hf_gpipe.runtime.stage import Stage


@dataclass(frozen=True)
class TrainableLayers:
    """The layers and parameters that are trained, by `requires_grad` when the stages are made.

    The gradients that stages send depend on them.

    Attributes:
        adapter: of the model.
        layers: whether each layer of the whole model is trained.
        own: by name, whether each parameter of this process is.
        parameters: by name, whether each parameter of the whole model is.
    """

    adapter: Adapter
    layers: Sequence[bool]
    own: Mapping[str, bool]
    parameters: Mapping[str, bool]

    @classmethod
    def of(cls, adapter: Adapter, models: Mapping[int, StageModel], world: World) -> TrainableLayers:
        """Every process must call it, with its own stages."""
        own = {name: p.requires_grad for model in models.values() for name, p in model.parameters.items()}
        own_layers = {
            number: adapter.is_trained(adapter.layers[number], own.model)
            for model in models.values()
            for own in ((model,) if model.head is None else (model, model.head))
            for number in range(own.start, own.stop)
        }
        parameters: dict[str, bool] = {}
        layers: dict[int, bool] = {}
        for of_process in world.gather_objects((own, own_layers), tuple[dict[str, bool], dict[int, bool]]):
            parameters.update(of_process[0])
            layers.update(of_process[1])
        return cls(adapter, [layers[number] for number in range(len(adapter.layers))], own, parameters)

    def stage(self, model: StageModel, make: Callable[..., Stage] = Stage) -> Stage:
        """A stage of this process, which sends the gradients that a trained layer needs; `make` has the arguments of
        `Stage`."""

        def wants_gradient(boundary: int) -> Mapping[str, bool]:
            return self.adapter.wants_gradient(boundary, self.layers)

        return make(model, wants_gradient)

    def check(self, models: Mapping[int, StageModel]) -> None:
        """Raise UserError if a `requires_grad` has changed since, or nothing or a quantised model is trained."""
        if self.adapter.peft is None and self.adapter.quantisation is not None:
            raise UserError(
                "the model's weights are quantised and cannot be trained; train adapters on them: give the Pipeline "
                "peft_config=LoraConfig(...), or a recipe lora.r (eval_step and generate need none)"
            )
        for model in models.values():
            for name, parameter in model.parameters.items():
                if parameter.requires_grad != self.own[name]:
                    raise UserError(
                        f"{name}: requires_grad was {self.own[name]} when the Pipeline was made and is "
                        f"{parameter.requires_grad} now; freeze or unfreeze parameters first, and make a new one"
                    )
        if not any(self.layers):
            raise UserError(
                "no parameter that the loss depends on has requires_grad=True, so there is nothing to train; unfreeze "
                "some of them, and make a new Pipeline (eval_step and generate need none)"
            )
