"""Optimizers (Muon, AdamW)."""

from lmworks.optim.clip import LossScaler, clip_gradients, global_norm
from lmworks.optim.groups import Group, group_parameters
from lmworks.optim.optimizer import Optimizer, build_optimizer

__all__ = ["Group", "LossScaler", "Optimizer", "build_optimizer", "clip_gradients", "global_norm", "group_parameters"]
