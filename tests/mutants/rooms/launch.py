"""Mistakes in the supervision of ranks."""

MUTANTS = [
    ("launch.rank:run_rank", "signal.signal(number, signal.SIG_IGN)", "pass",
     "A late request to stop does not keep the end from being recorded.", "launch/test_launch.py"),
    ("launch.launcher:Supervisor._exclude_failing", "times >= self.exclude_after_failures and len(self._agents) > self.min_hosts",
     "times >= self.exclude_after_failures", "A host is excluded only if enough are left.", "launch/test_supervisor.py"),
    ("launch.launcher:Supervisor._exclude_failing", "times >= self.exclude_after_failures and", "times > self.exclude_after_failures and",
     "A host is excluded after exclude_after_failures failures.", "launch/test_supervisor.py"),
    ("launch.launcher:Supervisor._readmit",
     "                self._start_agent(next(host for host in self.table.all() if host.name == name))\n", "                pass\n",
     "A readmitted host is started.", "launch/test_supervisor.py"),
    ("launch.launcher:Supervisor._exit_code", "return 130 if self._stop_time is not None else 1", "return 0",
     "A run that ended without an outcome is no success.", "launch/test_supervisor.py"),
    ("launch.launcher:Supervisor._receive", "self._stop_time = now\n            self.folder",
     "self._stop_time = None\n            self.folder", "A second Ctrl-C ends the ranks at once.", "launch/test_supervisor.py"),
    ("launch.launcher:Supervisor._collect", "if code and self._stop_time is None", "if code and self._stop_time is not None",
     "An agent that dies excludes its host.", "launch/test_supervisor.py"),
    ("launch.launcher:Launch._ranks_here", "sum(slots[: names.index(host.name)])", "0",
     "Agents of one machine take different processors of it.", "launch/test_pinning.py"),
    ("launch.rank_context:pin_rank", "machine.ranks_here()", 'int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])',
     "A rank is pinned among all ranks of its machine, not those of its agent.", "launch/test_pinning.py"),
]  # fmt: skip
