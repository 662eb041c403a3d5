"""Server metrics in the Prometheus text format."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmworks.serve.requests import EngineStats


@dataclass
class RequestStats:
    """Number of answered requests by path and status, and their total duration in seconds."""

    answered: dict[tuple[str, int], int] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, path: str, status: int, seconds: float) -> None:
        self.answered[path, status] = self.answered.get((path, status), 0) + 1
        self.seconds += seconds


def render_metrics(stats: EngineStats, requests: RequestStats) -> str:
    """Render the text of `/metrics`."""
    single = [
        ("lmworks_answers_running", "gauge", "requests being generated", stats.running),
        ("lmworks_answers_waiting", "gauge", "requests waiting for a slot", stats.waiting),
        ("lmworks_prompt_tokens_total", "counter", "prompt tokens processed", stats.prompt_tokens),
        ("lmworks_prefix_hit_tokens_total", "counter", "prompt tokens that were found in the prefix cache", stats.hit_tokens),
        ("lmworks_generated_tokens_total", "counter", "tokens generated", stats.generated_tokens),
        ("lmworks_request_seconds_total", "counter", "total duration of requests", round(requests.seconds, 3)),
    ]
    lines = []
    for name, kind, what, value in single:
        lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", f"{name} {value}"]
    lines += ["# HELP lmworks_requests_total requests answered", "# TYPE lmworks_requests_total counter"]
    for (path, status), count in sorted(requests.answered.items()):
        lines.append(f'lmworks_requests_total{{path="{path}",status="{status}"}} {count}')
    return "\n".join(lines) + "\n"
