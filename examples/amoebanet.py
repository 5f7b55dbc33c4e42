"""AmoebaNet-D (L, D), the convolutional network of GPipe (arXiv 1811.06965), as a chain of layers for a pipeline.

The cells are those of Real et al. (arXiv 1802.01548): a cell combines the outputs of the two cells before it. L normal
cells stand in three groups, between reduction cells that halve rows and columns and double the channels; D is the
number of channels of the stem times four.

    from amoebanet import amoebanet_d
    pipe = Pipeline(amoebanet_d(18, 256), num_stages=4, num_micro_batches=16)

Numbers of parameters, with 1000 classes, beside those that the paper prints:

    python examples/amoebanet.py
"""

import torch
from torch import nn
from torch.nn import functional as F

#: For each cell the pairs of (number of a state, operation on it), whose sums are the states from 2 on. States 0 and 1
#: are the results of the cell before and of the cell before that. Then come the states that are the cell's result.
NORMAL = (
    ((1, "1x1"), (1, "max_3x3")),
    ((1, "none"), (0, "1x7_7x1")),
    ((0, "1x1"), (0, "1x7_7x1")),
    ((2, "max_3x3"), (2, "none")),
    ((1, "avg_3x3"), (5, "1x1")),
), (0, 3, 4, 6)  # fmt: skip
REDUCTION = (
    ((0, "max_2x2"), (0, "max_3x3")),
    ((2, "none"), (1, "3x3")),
    ((2, "1x7_7x1"), (2, "max_3x3")),
    ((3, "none"), (1, "max_2x2")),
    ((2, "avg_3x3"), (3, "1x1")),
), (4, 5, 6)  # fmt: skip
#: (L, D) of GPipe's Table 1, and the parameters that it prints.
PAPER = {(18, 208): 82e6, (18, 416): 318e6, (18, 544): 542e6, (36, 544): 1.05e9, (72, 512): 1.8e9}


def convolution(
    given: int, made: int, size: tuple[int, int] = (1, 1), stride: int | tuple[int, int] = 1
) -> nn.Sequential:
    """ReLU, convolution, BatchNorm."""
    padding = (size[0] // 2, size[1] // 2)
    return nn.Sequential(nn.ReLU(), nn.Conv2d(given, made, size, stride, padding, bias=False), nn.BatchNorm2d(made))


class Halved(nn.Module):
    """Half the rows and columns: two convolutions of every other pixel, the second from one pixel further on."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(given, made // 2, 1, stride=2, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm2d(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.relu()
        moved = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.first(x), self.second(moved)], dim=1))


def operation(name: str, channels: int, stride: int) -> nn.Module:
    """One of a cell's operations. Larger convolutions are between two of 1 by 1, of a quarter of the channels."""
    if name == "none":
        return nn.Identity() if stride == 1 else Halved(channels, channels)
    if name == "avg_3x3":
        return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
    if name.startswith("max"):
        return nn.MaxPool2d(3, stride, 1) if name == "max_3x3" else nn.MaxPool2d(2, stride)
    if name == "1x1":
        return convolution(channels, channels, stride=stride)
    few = channels // 4
    if name == "3x3":
        inner = [convolution(few, few, (3, 3), stride)]
    else:
        inner = [convolution(few, few, (1, 7), (1, stride)), convolution(few, few, (7, 1), (stride, 1))]
    return nn.Sequential(convolution(channels, few), *inner, convolution(few, channels))


class Cell(nn.Module):
    """A cell. What passes from cell to cell is one tensor with the results of two, along its channels.

    Where the older result has twice the rows and columns, four of its pixels become one of four times the channels.

    Args:
        given: channels of the last result, and of the one before it.
        channels: of each state.
        is_reduction: whether it halves rows and columns.
        follows_reduction: whether the cell before did.
    """

    def __init__(self, given: tuple[int, int], channels: int, *, is_reduction: bool, follows_reduction: bool) -> None:
        super().__init__()
        last, older = given
        self.given, self.is_reduction, self.follows_reduction = given, is_reduction, follows_reduction
        self.last = convolution(last, channels)
        if follows_reduction:
            self.older: nn.Module = Halved(older, channels)
        else:
            self.older = nn.Identity() if older == channels else convolution(older, channels)
        pairs, self.result = REDUCTION if is_reduction else NORMAL
        self.states = tuple(state for pair in pairs for state, _ in pair)
        self.operations = nn.ModuleList(
            operation(name, channels, 2 if is_reduction and state < 2 else 1) for pair in pairs for state, name in pair
        )

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        last, older = both[:, : self.given[0]], both[:, self.given[0] :]
        if self.follows_reduction:
            older = F.pixel_shuffle(older, 2)
        states = [self.last(last), self.older(older)]
        for number in range(0, len(self.states), 2):
            one, other = (self.operations[i](states[self.states[i]]) for i in (number, number + 1))
            states.append(one + other)
        kept = F.pixel_unshuffle(last, 2) if self.is_reduction else last
        return torch.cat([*(states[number] for number in self.result), kept], dim=1)


class Stem(nn.Module):
    """The first convolution, whose result stands for those of the two cells before the first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        made = self.norm(self.convolution(pixels))
        return torch.cat([made, made], dim=1)


class Classifier(nn.Module):
    """The mean over all pixels of the last cell's result, and the linear layer of the classes."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.channels, self.linear = channels, nn.Linear(channels, num_classes)

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        return self.linear(both[:, : self.channels].mean((2, 3)))


def amoebanet_d(num_layers: int, num_filters: int, num_classes: int = 1000) -> nn.Sequential:
    """AmoebaNet-D (L, D), for images (B, 3, H, W) whose rows and columns are multiples of 32.

    Args:
        num_layers: L, a multiple of 3: the normal cells.
        num_filters: D, a multiple of 16.
        num_classes: of the result (B, C).
    """
    channels = num_filters // 4
    layers: list[nn.Module] = [Stem(channels)]
    given, follows_reduction = (channels, channels), False
    group = [True, *[False] * (num_layers // 3)]
    for is_reduction in (True, *group, *group, *group):  # the first two halve what the stem has made
        channels *= 2 if is_reduction else 1
        layers.append(Cell(given, channels, is_reduction=is_reduction, follows_reduction=follows_reduction))
        made = channels * len(REDUCTION[1] if is_reduction else NORMAL[1])
        given, follows_reduction = (made, given[0]), is_reduction
    return nn.Sequential(*layers, Classifier(given[0], num_classes))


if __name__ == "__main__":
    print("(L, D)      parameters    the paper's")
    for (layers, filters), printed in PAPER.items():
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in amoebanet_d(layers, filters).parameters())
        print(f"({layers}, {filters})  {count / 1e6:11.1f}M  {printed / 1e6:8.0f}M  {count / printed - 1:+.1%}")
