"""Asks a server fixed questions and compares its answers with recorded ones. Needs only Python's standard library.

`lmworks deploy` copies this file beside the other files of a deployment. A server that loads damaged weights can answer /health with 200
and generate noise; its log-probabilities then differ from the recorded ones by several nats.

python3 check.py URL --expect expected.json [--key-file FILE] asks once: exit code 0 if the answers agree, 1 if not, 2 for wrong arguments.
With --watch SECONDS it repeats and serves the result as metrics of Prometheus on --port.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import sys
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MISSING = 1.0
"""Difference (nats) that counts for a recorded token for which the server generated none."""


class Refused(ValueError):
    """The check cannot be made: arguments or files are wrong."""


def read_key(path: str | Path | None) -> str | None:
    """The API key in a file. Raises `Refused` if other users may read the file, or if it has no key."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as handle:
            mode = os.fstat(handle.fileno()).st_mode
            key = handle.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"the key file {path} cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from None
    if mode & 0o077:
        raise Refused(f"the key file {path} can be read by other users; run: chmod 600 {path}")
    if not key or not key.isascii() or not key.isprintable() or any(one.isspace() for one in key):
        raise Refused(f"the key file {path} must contain one key of printable ASCII characters without spaces")
    return key


def read_expected(path: str | Path) -> dict[str, Any]:
    """Recorded answers, as `lmworks deploy record` writes them. Raises `Refused` if the file is not of that kind."""
    try:
        with open(path, encoding="utf-8") as handle:
            found = json.load(handle)
        for item in found["items"]:
            assert isinstance(item["prompt"], str) and item["tokens"]
            for token in item["tokens"]:
                assert token["top"] and all(isinstance(text, str) and math.isfinite(value) for text, value in token["top"])
        assert found["items"] and float(found["tolerance"]) > 0 and isinstance(found["name"], str)
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise Refused(f"{path} has no recorded answers; make it with: lmworks deploy record MODEL --out {path}") from None
    return found  # type: ignore[no-any-return]


def require_address(url: str) -> None:
    """Raise `Refused` unless `url` is the address of a server, without credentials, which messages would show."""
    try:
        parts = urllib.parse.urlsplit(url)
        shown = url.isprintable() and " " not in url and parts.path.isascii()
        fits = shown and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        secret = "@" in parts.netloc or "?" in url
    except ValueError:  # a port or an IPv6 address that is none
        fits = secret = False
    if secret:
        raise Refused("the address of the server must have no credentials and no query; give the API key as a file, with --key-file")
    if not fits:
        raise Refused(f"{url!r} is no address of a server; write http://HOST:PORT")


def _call(url: str, key: str | None, body: dict[str, Any] | None, timeout: float) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as reply:
        return json.loads(reply.read(1 << 24))


def generated(choice: Any) -> list[tuple[str, float]]:
    """Text and log-probability of each generated token, from a choice of `/v1/completions` (OpenAI's old and new form)."""
    found = choice.get("logprobs") or {}
    if found.get("content") is not None:
        return [(str(one["token"]), float(one["logprob"])) for one in found["content"]]
    return [(str(text), float(value)) for text, value in zip(found["tokens"], found["token_logprobs"], strict=True)]


def differences(tokens: list[dict[str, Any]], answer: list[tuple[str, float]]) -> list[float]:
    """For each recorded token: a lower bound of how much the server's log-probabilities differ (nats), up to the first token at which the
    server chose another one.

    Both sides decode greedily, so the server's log-probability of its own choice is the largest that it gives to any token. If the choice
    is not among the recorded alternatives, the model gives it at most the lowest recorded value.
    """
    found = []
    for position, token in enumerate(tokens):
        top = dict(reversed(token["top"]))  # the likelier one of two tokens with equal text
        first, best = token["top"][0]
        if position >= len(answer):
            found.append(MISSING)
            break
        text, value = answer[position]
        if text == first:
            found.append(abs(value - best))
            continue
        found.append(max(best - value, abs(value - top[text]) if text in top else value - min(top.values())))
        break
    return [value if math.isfinite(value) else 100.0 for value in found]


def check(
    url: str, expected: dict[str, Any], key: str | None = None, tolerance: float | None = None, timeout: float = 60
) -> dict[str, Any]:
    """Ask the server at `url` (without /v1) all recorded prompts.

    Returns `ok`, `difference` (mean over the tokens, nats), `tolerance`, `worst` (the prompt with the largest mean), and `reason`: empty,
    or why the check failed.
    """
    base = url.rstrip("/").removesuffix("/v1")
    limit = float(expected["tolerance"] if tolerance is None else tolerance)
    result: dict[str, Any] = {"ok": False, "difference": None, "tolerance": limit, "worst": "", "tokens": 0}
    everything: list[float] = []
    worst = -1.0
    try:
        names = [str(one["id"]) for one in _call(f"{base}/v1/models", key, None, timeout)["data"]]
        name = expected["name"]
        if name not in names:
            return result | {"reason": f"{base} serves {', '.join(names) or 'no model'}, and not {name}, the name that clients were given"}
        for item in expected["items"]:
            body = {"model": name, "prompt": item["prompt"], "max_tokens": len(item["tokens"]), "temperature": 0, "logprobs": 1}
            answer = generated(_call(f"{base}/v1/completions", key, body, timeout)["choices"][0])
            found = differences(item["tokens"], answer)
            everything += found
            if sum(found) / len(found) > worst:
                worst, result["worst"] = sum(found) / len(found), item["prompt"]
    except (OSError, http.client.HTTPException) as error:  # refused, not in time, or no HTTP
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error or type(error).__name__
        return result | {"reason": f"{base} does not answer: {' '.join(str(why).split())}"}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        return result | {"reason": f"{base} sent a reply without log-probabilities ({type(error).__name__}: {error})"}
    mean = sum(everything) / len(everything)
    ok = mean <= limit
    reason = "" if ok else f"log-probabilities differ by {mean:.3g} nats, more than {limit:.3g}: the server does not compute this model"
    return result | {"ok": ok, "difference": mean, "tokens": len(everything), "reason": reason}


class Watch:
    """The latest result as metrics of Prometheus."""

    def __init__(self) -> None:
        self.lock, self.result, self.seconds, self.when = threading.Lock(), None, 0.0, 0.0
        self.counts = {"ok": 0, "failed": 0}

    def update(self, result: dict[str, Any], seconds: float) -> None:
        """Take over a result."""
        with self.lock:
            self.result, self.seconds, self.when = result, seconds, time.time()  # type: ignore[assignment]
            self.counts["ok" if result["ok"] else "failed"] += 1

    def text(self) -> str:
        """The text of `/metrics`; without a result there are only the counters."""
        lines = ["# HELP lmworks_checks_total checks by result", "# TYPE lmworks_checks_total counter"]
        with self.lock:
            lines += [f'lmworks_checks_total{{result="{name}"}} {count}' for name, count in self.counts.items()]
            result: Any = self.result
            values = [] if result is None else [
                ("ok", "1 if the server's answers agree with the recorded ones", int(result["ok"])),
                ("difference_nats", "mean difference of log-probabilities", result["difference"]),
                ("tolerance_nats", "largest difference that passes", result["tolerance"]),
                ("seconds", "duration of the latest check", round(self.seconds, 3)),
                ("time_seconds", "when the latest check ended, seconds since 1970", round(self.when, 3)),
            ]  # fmt: skip
        for name, what, value in values:
            if value is not None:
                lines += [f"# HELP lmworks_check_{name} {what}", f"# TYPE lmworks_check_{name} gauge", f"lmworks_check_{name} {value}"]
        return "\n".join(lines) + "\n"


def listen(watch: Watch, host: str, port: int) -> ThreadingHTTPServer:
    """Serve the metrics of `watch` in a thread. Raises `OSError` if the address is in use."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            known = self.path.split("?")[0] == "/metrics"
            data = watch.text().encode() if known else b"see /metrics\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer((host, port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main(arguments: list[str] | None = None) -> int:
    """The command line of this file; returns the exit code."""
    parser = argparse.ArgumentParser(description="Ask a server fixed questions and compare its answers with recorded ones.")
    parser.add_argument("url", help="such as http://127.0.0.1:8000")
    parser.add_argument("--expect", required=True, help="recorded answers")
    parser.add_argument("--key-file", help="file with the API key, readable by its owner only")
    parser.add_argument("--tolerance", type=float, help="largest mean difference in nats; by default the recorded one")
    parser.add_argument("--timeout", type=float, default=60, help="seconds per question")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="repeat, with this pause")
    parser.add_argument("--host", default="127.0.0.1", help="address of the metrics of --watch")
    parser.add_argument("--port", type=int, default=9105, help="port of the metrics of --watch")
    options = parser.parse_args(arguments)
    try:
        require_address(options.url)
        expected, key = read_expected(options.expect), read_key(options.key_file)
        watch = Watch()
        server = listen(watch, options.host, options.port) if options.watch else None
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot listen on {options.host}:{options.port} ({error.strerror}); choose another --port", file=sys.stderr)
        return 2
    try:
        while True:
            began = time.monotonic()
            result = check(options.url, expected, key, options.tolerance, options.timeout)
            watch.update(result, time.monotonic() - began)
            print(f"ok: {result['difference']:.4f} nats" if result["ok"] else f"failed: {result['reason']}", flush=True)
            if server is None:
                return 0 if result["ok"] else 1
            time.sleep(options.watch)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
