"""The one declaration from which dashboards are made: what is drawn, by which query of Prometheus."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from lmworks.metrics.log import prometheus_name
from lmworks.metrics.names import METRICS, Metric
from lmworks.recipe.schema.model import Model

_RATE = "$__rate_interval"  # Grafana replaces it with a multiple of the scrape interval


@dataclass(frozen=True)
class Query:
    """A query and the name of its line."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One chart. `unit` is Grafana's id of a unit."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    description: str = ""


@dataclass(frozen=True)
class EngineMetrics:
    """What an engine reports. `errors` is the share of failed requests over five minutes, None if the engine does not count them, then with
    `no_errors` as the reason; `waiting` is the number of requests that wait."""

    panels: tuple[Panel, ...]
    waiting: str
    errors: str | None
    no_errors: str = ""


def _rate(metric: str, legend: str) -> Query:
    return Query(f"sum(rate({metric}[{_RATE}]))", legend)


def _quantiles(metric: str) -> tuple[Query, ...]:
    return tuple(Query(f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket[{_RATE}])))", f"{q:.0%}") for q in (0.5, 0.9, 0.99))


def _requests(running: str, waiting: str) -> Panel:
    return Panel("Requests", "short", (Query(f"sum({running})", "running"), Query(f"sum({waiting})", "waiting")))


def _tokens(prompt: str, output: str) -> Panel:
    return Panel("Tokens per second", "short", (_rate(prompt, "prompts"), _rate(output, "answers")))


def _share(failed: str, every: str, window: str = "5m") -> str:
    """0 while there are no requests; a server without a failure has no series of failures."""
    return f"(sum(rate({failed}[{window}])) or vector(0)) / ((sum(rate({every}[{window}])) > 0) or vector(1))"


ENGINE_METRICS: dict[str, EngineMetrics] = {
    "lmworks": EngineMetrics(
        panels=(
            _requests("lmworks_answers_running", "lmworks_answers_waiting"),
            _tokens("lmworks_prompt_tokens_total", "lmworks_generated_tokens_total"),
            Panel(
                "Requests per second by status", "reqps", (Query(f"sum by (status) (rate(lmworks_requests_total[{_RATE}]))", "{{status}}"),)
            ),
            Panel(
                "Mean duration of a request",
                "s",
                (Query(f"sum(rate(lmworks_request_seconds_total[{_RATE}])) / sum(rate(lmworks_requests_total[{_RATE}]))", "mean"),),
            ),
        ),
        waiting="sum(lmworks_answers_waiting)",
        errors=_share('lmworks_requests_total{status=~"5.."}', "lmworks_requests_total"),
    ),
    "vllm": EngineMetrics(
        panels=(
            _requests("vllm:num_requests_running", "vllm:num_requests_waiting"),
            _tokens("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
            Panel("Time to the first token", "s", _quantiles("vllm:time_to_first_token_seconds")),
            Panel("Time per output token", "s", _quantiles("vllm:inter_token_latency_seconds")),
            Panel("Duration of a request", "s", _quantiles("vllm:e2e_request_latency_seconds")),
            Panel("KV cache in use", "percentunit", (Query("max(vllm:kv_cache_usage_perc)", "share"),)),
            Panel(
                "Prefix cache",
                "percentunit",
                (
                    Query(
                        _share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", _RATE),
                        "hits per prompt token",
                    ),
                ),
            ),
            Panel(
                "Requests per second by status", "reqps", (Query(f"sum by (status) (rate(http_requests_total[{_RATE}]))", "{{status}}"),)
            ),
        ),
        waiting="sum(vllm:num_requests_waiting)",
        errors=_share('http_requests_total{status="5xx"}', "http_requests_total"),
    ),
    "sglang": EngineMetrics(
        panels=(
            _requests("sglang:num_running_reqs", "sglang:num_queue_reqs"),
            _tokens("sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
            Panel("Time to the first token", "s", _quantiles("sglang:time_to_first_token_seconds")),
            Panel("Duration of a request", "s", _quantiles("sglang:e2e_request_latency_seconds")),
            Panel("KV cache in use", "percentunit", (Query("max(sglang:token_usage)", "share"),)),
            Panel("Prefix cache", "percentunit", (Query("avg(sglang:cache_hit_rate)", "hit rate"),)),
            Panel(
                "Requests per second by status",
                "reqps",
                (Query(f"sum by (status_code) (rate(sglang:http_responses_total[{_RATE}]))", "{{status_code}}"),),
            ),
        ),
        waiting="sum(sglang:num_queue_reqs)",
        errors=_share('sglang:http_responses_total{status_code=~"5.."}', "sglang:http_responses_total"),
    ),
    "llama.cpp": EngineMetrics(
        panels=(
            _requests("llamacpp:requests_processing", "llamacpp:requests_deferred"),
            _tokens("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"),
            Panel(
                "Speed of computation",
                "short",
                (
                    Query("avg(llamacpp:prompt_tokens_seconds)", "prompt tokens per second"),
                    Query("avg(llamacpp:predicted_tokens_seconds)", "answer tokens per second"),
                ),
            ),
            Panel("Busy slots per step", "short", (Query("avg(llamacpp:n_busy_slots_per_decode)", "slots"),)),
        ),
        waiting="sum(llamacpp:requests_deferred)",
        errors=None,
        no_errors="llama.cpp does not count failed requests; the check reports a server that does not answer",
    ),
}

CHECK_PANELS = (
    Panel(
        "Server and check answer",
        "short",
        (Query('min(up{job="engine"})', "metrics answer"), Query("min(lmworks_check_ok)", "answers agree")),
        "1 is good. The check asks the server fixed questions and compares log-probabilities with recorded ones.",
    ),
    Panel(
        "Difference from the recorded answers",
        "short",
        (
            Query("max(lmworks_check_difference_nats)", "difference in nats"),
            Query("max(lmworks_check_tolerance_nats)", "largest that passes"),
        ),
    ),
)


def serving_panels(engine: str) -> list[tuple[str, tuple[Panel, ...]]]:
    """Rows of the dashboard of an engine: title and panels."""
    return [("Health", CHECK_PANELS), ("Engine", ENGINE_METRICS[engine].panels)]


_ROWS = {
    "train": "Loss and progress",
    "optim": "Optimizer",
    "validation": "Validation",
    "perf": "Speed",
    "experts": "Experts",
    "system": "Machine",
}
_UNITS = {"s": "s", "bytes": "bytes", "%": "percent", "degrees C": "celsius", "W": "watt"}
_ALL_LAYERS = "{layer}"


def training_panels(model: Model | None) -> list[tuple[str, tuple[Panel, ...]]]:
    """Rows of the dashboard of training, from the table of metrics: those that every run writes, and those of what `model` has."""
    conditions = {""} | ({"model.moe"} if model and model.moe else set()) | ({"model.mtp"} if model and model.mtp else set())
    rows: dict[str, list[Panel]] = defaultdict(list)
    for name, metric in METRICS.items():
        group = name.split("/")[0]
        if group in _ROWS and metric.when in conditions and "{layer}" not in name:
            rows[group].append(_panel(metric))
    rows["perf"].append(Panel("Step", "short", (Query('lmworks_step{job="trainer"}', "step"),)))
    rows["system"] += [
        Panel("Free disk space of the run directory", "bytes", (Query('lmworks_disk_free_bytes{job="trainer"}', "free"),)),
        Panel(
            "Silence of the ranks",
            "s",
            (Query('max by (rank) (lmworks_rank_silent_seconds{job="trainer"})', "rank {{rank}}"),),
            "Seconds since each rank last showed that its process is alive.",
        ),
    ]
    return [(_ROWS[group], tuple(rows[group])) for group in _ROWS if rows[group]]


def _panel(metric: Metric) -> Panel:
    name = prometheus_name(metric.name)
    expression = f'{name}{{job="trainer"}}'
    if "{" in metric.name:
        pattern = ".+".join(prometheus_name(part)[len("lmworks_") :] for part in _between_braces(metric.name))
        expression = f'{{__name__=~"lmworks_{pattern}", job="trainer"}}'
    return Panel(metric.name, _UNITS.get(metric.unit, "short"), (Query(expression, "{{__name__}}"),), _described(metric))


def _between_braces(name: str) -> list[str]:
    import re

    return re.split(r"\{\w+\}", name)


def _described(metric: Metric) -> str:
    return metric.meaning + (f" [{metric.unit}]" if metric.unit else "")
