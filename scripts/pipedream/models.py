"""The models of PipeDream's evaluation (SOSP 2019) as lists of layers, from their public shapes.

Everything is computed from the architectures: operations of matrix products and convolutions, bytes that the other
operations move, bytes of weights, and bytes that cross to the next layer. All in float32, as in the paper. A layer's
backward is twice its forward, but for the first layer, which needs no gradient of its input.

Mini-batches per GPU: 64 for VGG-16 and GNMT and 128 for ResNet-50, from the driver and profile files of the authors'
public code (github.com/msr-fiddle/pipedream), whose profile of GNMT-16 has sequences of 50 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from pipedream.partitioner import LayerCosts

FLOAT = 4
#: Of a V100: operations a second in float32 and bytes a second of its memory, from the data sheet.
V100_FLOPS, V100_BYTES = 15.7e12, 0.9e12
#: The linear layers and LSTMs of the authors' published profiles reach 10 to 11 TFLOP/s.
UTILISATION = 0.65


@dataclass(frozen=True)
class Layer:
    """One layer on one mini-batch: `flops` and `moved_bytes` of its forward, parameters, and what it hands on."""

    name: str
    flops: float
    moved_bytes: float
    parameters: int
    crossing_bytes: float
    first: bool = False

    def seconds(self, utilisation: float) -> float:
        """Forward and backward on a V100."""
        passes = 2 if self.first else 3
        return passes * (self.flops / (utilisation * V100_FLOPS) + self.moved_bytes / V100_BYTES)


@dataclass(frozen=True)
class Model:
    """A model and the mini-batch of one device."""

    name: str
    batch: int
    layers: tuple[Layer, ...]

    @property
    def weight_bytes(self) -> int:
        return FLOAT * sum(layer.parameters for layer in self.layers)

    def costs(self, utilisation: float = UTILISATION) -> LayerCosts:
        return LayerCosts(
            [layer.seconds(utilisation) for layer in self.layers],
            [layer.crossing_bytes for layer in self.layers],
            [FLOAT * layer.parameters for layer in self.layers],
        )


def vgg16(batch: int = 64) -> Model:
    """13 convolutions, 5 pools and 3 linear layers on 224x224 images. A pool is part of the layer before it."""
    layers, channels, size = [], 3, 224
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for index in range(count):
            flops = 2 * 9 * channels * width * size**2 * batch
            moved = 2 * FLOAT * batch * width * size**2  # ReLU
            out = size
            if index == count - 1:
                out = size // 2
                moved += FLOAT * batch * width * (size**2 + out**2)
            crossing = FLOAT * batch * width * out**2
            layers.append(Layer(f"conv{width}", flops, moved, 9 * channels * width + width, crossing, first=not layers))
            channels, size = width, out
    inputs = channels * size**2
    for width in (4096, 4096, 1000):
        crossing = FLOAT * batch * width
        layers.append(Layer(f"linear{width}", 2 * batch * inputs * width, 3 * crossing, (inputs + 1) * width, crossing))
        inputs = width
    return Model("VGG-16", batch, tuple(layers))


def resnet50(batch: int = 128) -> Model:
    """The stem, 16 whole bottleneck blocks and the classifier on 224x224 images."""

    def convolution(inputs: int, outputs: int, kernel: int, size: int) -> tuple[float, float, int]:
        """With its batch norm, which reads twice and writes once; `size` is that of the output."""
        values = batch * outputs * size**2
        flops = 2 * kernel**2 * inputs * values
        return flops, 3 * FLOAT * values, kernel**2 * inputs * outputs + 2 * outputs

    flops, moved, parameters = convolution(3, 64, 7, 112)
    moved += FLOAT * batch * 64 * (3 * 112**2 + 56**2)  # ReLU and pool
    layers = [Layer("stem", flops, moved, parameters, FLOAT * batch * 64 * 56**2, first=True)]
    channels, size = 64, 56
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            out = size // stride if index == 0 else size
            parts = [
                convolution(channels, width, 1, size),
                convolution(width, width, 3, out),
                convolution(width, 4 * width, 1, out),
            ]
            if index == 0:
                parts.append(convolution(channels, 4 * width, 1, out))
            crossing = FLOAT * batch * 4 * width * out**2
            # Two ReLUs of the narrow tensors, then the sum and the ReLU of the wide one.
            relus = 2 * FLOAT * batch * width * (size**2 + out**2) + 5 * crossing
            flops, moved, parameters = (sum(values) for values in zip(*parts, strict=True))
            layers.append(Layer(f"block{4 * width}", flops, moved + relus, int(parameters), crossing))
            channels, size = 4 * width, out
    crossing = FLOAT * batch * 1000
    layers.append(Layer("linear", 2 * batch * 2048 * 1000, crossing, 2049 * 1000, crossing))
    return Model("ResNet-50", batch, tuple(layers))


def _lstm(inputs: int, hidden: int, tokens: int) -> tuple[float, float, int]:
    """Four gates with two biases each. A step reads the recurrent weights again, but cuDNN keeps them on the chip."""
    weights = 4 * hidden * (inputs + hidden)
    return 2 * tokens * weights, 10 * FLOAT * tokens * hidden, weights + 8 * hidden


def gnmt(num_layers: int, batch: int = 64, length: int = 50, vocabulary: int = 32320) -> Model:
    """num_layers LSTMs of width 1024, half of them in the encoder, whose first has two directions.

    Every decoder layer after the attention reads the attention's context beside the hidden states, so both cross.
    """
    d, tokens = 1024, batch * length
    hidden = FLOAT * tokens * d
    layers = [
        Layer("embedding", 0, 2 * hidden, vocabulary * d, hidden, first=True),
        Layer("lstm-both", *_doubled(_lstm(d, d, tokens)), 2 * hidden),
        Layer("lstm", *_lstm(2 * d, d, tokens), hidden),
    ]
    layers += [Layer("lstm", *_lstm(d, d, tokens), hidden) for _ in range(num_layers // 2 - 2)]
    layers.append(Layer("embedding", 0, 2 * hidden, vocabulary * d, 2 * hidden))
    flops, moved, parameters = _lstm(d, d, tokens)
    # Bahdanau's attention: queries and keys are projected, then every target position meets every source position.
    flops += 2 * 2 * tokens * d * d + 2 * 3 * batch * length**2 * d
    moved += 2 * FLOAT * batch * length**2 * d
    layers.append(Layer("lstm-attention", flops, moved, parameters + 2 * d * d + d, 2 * hidden))
    layers += [Layer("lstm", *_lstm(2 * d, d, tokens), 2 * hidden) for _ in range(num_layers // 2 - 1)]
    logits = FLOAT * tokens * vocabulary
    layers.append(Layer("classifier", 2 * tokens * d * vocabulary, 4 * logits, (d + 1) * vocabulary, logits))
    return Model(f"GNMT-{num_layers}", batch, tuple(layers))


def _doubled(costs: tuple[float, float, int]) -> tuple[float, float, int]:
    flops, moved, parameters = costs
    return 2 * flops, 2 * moved, 2 * parameters


def awd_lm(batch: int = 80, length: int = 70, vocabulary: int = 10000, num_lstms: int = 3) -> Model:
    """AWD-LSTM on the Penn Treebank: embedding 400, LSTMs of width 1150, the last of 400, a decoder of its own."""
    tokens, widths = batch * length, [400, *[1150] * (num_lstms - 1), 400]
    layers = [Layer("embedding", 0, 2 * FLOAT * tokens * 400, vocabulary * 400, FLOAT * tokens * 400, first=True)]
    for inputs, outputs in pairwise(widths):
        layers.append(Layer(f"lstm{outputs}", *_lstm(inputs, outputs, tokens), FLOAT * tokens * outputs))
    logits = FLOAT * tokens * vocabulary
    layers.append(Layer("decoder", 2 * tokens * 400 * vocabulary, 4 * logits, 401 * vocabulary, logits))
    return Model("AWD LM", batch, tuple(layers))
