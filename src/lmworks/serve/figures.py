"""A few figures for Prometheus, in its text format."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmworks.serve.engine import Figures


@dataclass
class Requests:
    """Requests answered, by path and status, and the seconds that they took together."""

    answered: dict[tuple[str, int], int] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, path: str, status: int, seconds: float) -> None:
        self.answered[path, status] = self.answered.get((path, status), 0) + 1
        self.seconds += seconds


def exposition(figures: Figures, requests: Requests) -> str:
    """Everything that `/metrics` shows."""
    single = [
        ("lmworks_answers_running", "gauge", "answers being generated", figures.running),
        ("lmworks_answers_waiting", "gauge", "answers waiting for a place", figures.waiting),
        ("lmworks_prompt_tokens_total", "counter", "tokens read", figures.prompt_tokens),
        ("lmworks_generated_tokens_total", "counter", "tokens generated", figures.generated_tokens),
        ("lmworks_request_seconds_total", "counter", "seconds spent on requests, summed over them", round(requests.seconds, 3)),
    ]
    lines = []
    for name, kind, what, value in single:
        lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", f"{name} {value}"]
    lines += ["# HELP lmworks_requests_total requests answered", "# TYPE lmworks_requests_total counter"]
    for (path, status), count in sorted(requests.answered.items()):
        lines.append(f'lmworks_requests_total{{path="{path}",status="{status}"}} {count}')
    return "\n".join(lines) + "\n"
