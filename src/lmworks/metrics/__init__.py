"""The numbers of a run: fixed names, where they are written, and what the machine says about itself."""

from lmworks.metrics.log import MetricLog, read
from lmworks.metrics.names import METRICS, describe

__all__ = ["METRICS", "MetricLog", "describe", "read"]
