"""Optimizers (Muon, AdamW)."""

from lmworks.optim.clip import clip_gradients, global_norm
from lmworks.optim.groups import Group, group_parameters
from lmworks.optim.optimizer import Optimizer, build_optimizer
from lmworks.optim.scaler import LossScaler

__all__ = ["Group", "LossScaler", "Optimizer", "build_optimizer", "clip_gradients", "global_norm", "group_parameters"]
