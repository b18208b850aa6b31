"""The networks of EDL's ResNet examples: ResNets of both variants, and ResNeXt101_32x16d_wsl as a teacher."""

from __future__ import annotations

from collections.abc import Callable

from paddle import nn
from paddle.vision.models.resnet import BasicBlock, BottleneckBlock, ResNet


class ResNetVd(ResNet):
    """A ResNet of variant D: three 3x3 convolutions first, and shortcuts that average before they shrink."""

    def __init__(self, block: type[nn.Layer], depth: int, classes: int) -> None:
        super().__init__(block, depth, num_classes=classes)
        self.conv1 = nn.Sequential(
            nn.Conv2D(3, 32, 3, stride=2, padding=1, bias_attr=False),
            nn.BatchNorm2D(32),
            nn.ReLU(),
            nn.Conv2D(32, 32, 3, padding=1, bias_attr=False),
            nn.BatchNorm2D(32),
            nn.ReLU(),
            nn.Conv2D(32, 64, 3, padding=1, bias_attr=False),
        )
        for stage in (self.layer2, self.layer3, self.layer4):
            convolution, norm = stage[0].downsample
            filters, channels = convolution.weight.shape[:2]
            stage[0].downsample = nn.Sequential(
                nn.AvgPool2D(2, stride=2, ceil_mode=True), nn.Conv2D(channels, filters, 1, bias_attr=False), norm
            )


MODELS: dict[str, Callable[[int], nn.Layer]] = {
    "ResNet18": lambda classes: ResNet(BasicBlock, 18, num_classes=classes),
    "ResNet50": lambda classes: ResNet(BottleneckBlock, 50, num_classes=classes),
    "ResNet18_vd": lambda classes: ResNetVd(BasicBlock, 18, classes),
    "ResNet34_vd": lambda classes: ResNetVd(BasicBlock, 34, classes),
    "ResNet50_vd": lambda classes: ResNetVd(BottleneckBlock, 50, classes),
    "ResNet101_vd": lambda classes: ResNetVd(BottleneckBlock, 101, classes),
    "ResNeXt101_32x16d_wsl": lambda classes: ResNet(BottleneckBlock, 101, width=16, num_classes=classes, groups=32),
}
"""Makes a network of so many classes, by the names of EDL."""
