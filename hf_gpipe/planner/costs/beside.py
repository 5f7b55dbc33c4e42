"""The costs of a teacher's stages beside those of the student: it runs in F alone, and its weights are always there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.costs.prefix_sums import LayerSums


class Beside(NamedTuple):
    """The share that a teacher's stage adds to a stage, for one micro-batch.

    Attributes:
        held_bytes: the bytes of weights and buffers.
        input_bytes: the bytes that cross the boundary before the teacher's stage.
        sent_bytes: the bytes that F gives to the next stage.
        kept_bytes: the bytes kept from F to B: on the last stage the hidden states of which B makes the logits.
        forward_bytes: the peak of the teacher's forward, its input included.
        forward_seconds: the seconds of the teacher's forward.
        backward_seconds: the seconds of the projection to the teacher's logits, which B of the last stage makes.
    """

    held_bytes: float = 0
    input_bytes: int = 0
    sent_bytes: int = 0
    kept_bytes: int = 0
    forward_bytes: float = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    def forward_peak(self, own_bytes: float) -> float:
        """The peak bytes of an F: the teacher's forward, then the student's forward, which takes `own_bytes`."""
        return max(self.forward_bytes, self.input_bytes + self.sent_bytes + own_bytes)


NOTHING = Beside()


def besides(teacher: LayerSums | None, num_stages: int) -> Sequence[Beside]:
    """The share that a teacher adds to each stage. It is cut by the number of layers; None: there is no teacher."""
    if teacher is None:
        return [NOTHING] * num_stages
    layers = teacher.costs.layers
    of_stages = []
    for own in cut(len(layers), num_stages, "count"):
        run, is_last = (own.start, own.stop), own.stop == len(layers)
        # The head's backward has the projection, and as many operations again for each of two gradients.
        of_head = teacher.seconds(own.stop - 1, own.stop, "none").backward / 3 if is_last else 0.0
        boundary = layers[-1 if is_last else own.stop].input_bytes
        of_stages.append(
            Beside(
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
