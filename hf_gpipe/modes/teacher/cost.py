"""The cost of a teacher: the share that its stages add to the stages of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.costs.stage_costs import Share, StageCosts
from hf_gpipe.planner.plan import Plan
from hf_gpipe.text import size_text


def shares(teacher: StageCosts, num_stages: int) -> Sequence[Share]:
    """The share that a teacher adds to each stage. It is cut by the number of layers.

    The last stage keeps the teacher's hidden states from F to B, which makes the teacher's logits of them.
    """
    layers = teacher.costs.layers
    of_stages = []
    for own in cut(len(layers), num_stages, "count"):
        run, is_last = (own.start, own.stop), own.stop == len(layers)
        # The head's backward has the projection, and as many operations again for each of two gradients.
        of_head = teacher.seconds(own.stop - 1, own.stop, "none").backward / 3 if is_last else 0.0
        boundary = layers[-1 if is_last else own.stop].input_bytes
        of_stages.append(
            Share(
                held_bytes=teacher.held(*run).num_bytes + teacher.buffer_bytes(*run),
                input_bytes=layers[own.start].input_bytes,
                sent_bytes=0 if is_last else boundary,
                kept_bytes=boundary if is_last else 0,
                forward_bytes=teacher.forward_only_peak_bytes(*run),
                forward_seconds=teacher.seconds(*run, "none").forward_only,
                backward_seconds=of_head,
            )
        )
    return of_stages


def lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield a line about the weights of the teacher."""
    held = [round(stage.share.held_bytes) for stage in plan.layout.stages]
    if any(held):
        whole, most = size_text(sum(held)), size_text(max(held))
        yield "teacher", f"{whole} of weights in the same stages, at most {most} in one; it runs in F"
