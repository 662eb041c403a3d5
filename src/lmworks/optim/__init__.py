"""Optimizers (Muon, AdamW) and learning-rate schedules."""

from lmworks.optim.clip import clip_gradients, global_norm
from lmworks.optim.groups import Group, group_parameters
from lmworks.optim.optimizer import Optimizer, build_optimizer
from lmworks.optim.scaler import LossScaler
from lmworks.optim.schedules import Schedules

__all__ = ["Group", "LossScaler", "Optimizer", "Schedules", "build_optimizer", "clip_gradients", "global_norm", "group_parameters"]
