"""Will it fit, and how fast: costs of layers, bills of stages, and the choice of a split."""
