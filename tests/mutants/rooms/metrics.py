"""Mistakes in the log of metrics."""

MUTANTS = [
    ("metrics.log:MetricLog.__init__", 'record["step"] >= resume_step', 'record["step"] > resume_step',
     "A resumed curve has each step once.", "metrics/test_metric_log.py"),
    ("metrics.log:MetricLog.rewind", "self._on_sinks(lambda sink: sink.rewind(resume_step))", "pass", "A rollback rewinds all sinks.",
     "metrics/test_sinks.py metrics/test_metric_log.py"),
    ("metrics.log:MetricLog.flush", "            os.fsync(self._fd)\n", "            pass\n",
     "Metrics are on the disk with each checkpoint.", "metrics/test_metric_log.py"),
    ("metrics.log:MetricLog.write", "            describe(name)\n", "            pass\n", "A metric without a declared meaning is refused.",
     "metrics/test_metric_log.py metrics/test_names.py"),
    ("metrics.system:GpuSignals.metrics", "torch.cuda.utilization() / 100", "torch.cuda.utilization()",
     "perf/gpu_utilization is a share, not per cent.", "metrics/test_system.py"),
    ("metrics.system:MachineSignals.metrics", "ended + _SHARE * (ended - began)", "ended",
     "Reading the machine takes half a per cent of the time at most.", "metrics/test_system.py"),
    ("metrics.log:_Live._known", "if time.monotonic() >= self._read_again:", "if True:",
     "A scrape does not read the heartbeats more often than ranks write them.", "metrics/test_sinks.py"),
]  # fmt: skip
