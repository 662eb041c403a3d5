"""The ledger as a person reads it."""

from __future__ import annotations

import json
import time
from typing import Any

from lmworks.io.run_layout import MODEL_STAGES
from lmworks.pages.run_records import Json, Run
from lmworks.ui.amounts import compact, short_size, significant, span
from lmworks.watch.ledger import shown_step, skipped_steps

_KINDS = {
    "start": "start",
    "start_over": "start",
    "resume": "resume",
    "phase": "phase",
    "batch_grew": "phase",
    "finish": "finish",
    "checkpoint": "checkpoint",
    "checkpoint_refused": "bad",
    "bad_step": "bad",
    "out_of_memory": "bad",
    "stopped": "bad",
    "recipe_changed": "recipe",
    "stage_began": "stage",
    "stage_ended": "stage",
    "spike": "bad",
    "spike_accepted": "bad",
    "finding": "bad",
    "stall": "bad",
    "alert_failed": "bad",
    "not_finite": "bad",
    "weights_not_finite": "bad",
    "rollback": "bad",
    "corruption": "bad",
    "slow_rank": "bad",
    "rank_exit": "bad",
    "resumed_step": "resume",
    "host_excluded": "bad",
    "host_started": "resume",
    "save_failed": "bad",
    "data_starved": "bad",
    "reward_failed": "bad",
    "no_signal": "bad",
}
_LONGEST = 400
_LATEST = 2.5e11  # seconds since 1970, of the last year with four digits
STAGE_WORDS = {
    "corpus": "Corpus",
    "tokenizer": "Tokenizer",
    "shards": "Shards",
    **{stage.stage: stage.title for stage in MODEL_STAGES},
    "evaluate": "Evaluation",
    "export": "Export",
}


def timeline(run: Run) -> Json:
    """Entries by day, oldest first, with the number of omitted ones in the middle."""
    days: list[Json] = []
    for event in run.events:
        when = event.get("time")
        local = time.localtime(when) if isinstance(when, int | float) and 0 <= when < _LATEST else None
        day = time.strftime("%A, %d %B %Y", local) if local else "at an unknown time"
        if not days or days[-1]["day"] != day:
            days.append({"day": day, "entries": []})
        title, text = _words(event)
        days[-1]["entries"].append(
            {
                "clock": time.strftime("%H:%M:%S", local) if local else "",
                "kind": _KINDS.get(str(event.get("event")), "other"),
                "title": title,
                "text": text[:_LONGEST],
            }
        )
    return {"days": days, "left_out": run.events_omitted} if days else {}


def _words(event: Json) -> tuple[str, str]:
    what = str(event.get("event", ""))
    step = f"step {shown:,}" if (shown := shown_step(event)) is not None else ""
    stage = STAGE_WORDS.get(str(event.get("stage")), "Training")
    try:
        match what:
            case "start":
                return f"{stage} began", f"{event['steps']:,} steps, {compact(event['tokens'])} tokens"
            case "start_over":
                return f"{stage} starts over", f"the checkpoints up to {step} are gone; {event['rollbacks']:,} rollbacks no longer apply"
            case "resume":
                return f"{stage} went on", f"from {step}, {compact(event['tokens'])} tokens seen"
            case "phase":
                return f"Phase {event['phase']}", f"{step}, sequences of {event['sequence_length']:,} tokens"
            case "batch_grew":
                loss = f" at a loss of {significant(event['loss'], 4)}" if event.get("loss") is not None else ""
                now = f"{compact(event['tokens_per_step'])} tokens per step{loss}; at most {event['steps']:,} steps now"
                return "The batch grew", f"{step}, phase {event['phase']}: {now}"
            case "finish":
                return f"{stage} finished", f"{step}, {compact(event['tokens'])} tokens"
            case "checkpoint":
                metric = f", held-out {significant(event['metric'], 4)}" if event.get("metric") is not None else ""
                return "Checkpoint", f"{step}, {short_size(event['bytes'])} in {span(event['seconds'])}{metric}"
            case "stage_began":
                return f"{STAGE_WORDS[event['name']]} began", ""
            case "stage_ended":
                return f"{STAGE_WORDS[event['name']]} finished", f"took {span(event['seconds'])}"
            case "spike":
                over = [
                    f"{name} {significant(event[key], 4)}, limit {significant(event[f'{key}_limit'], 4)}"
                    for key, name in (("loss", "loss"), ("grad_norm", "gradient norm"))
                ]
                return "Spike", f"{step}: {'; '.join(over)}; action: {event['action']}"
            case "spike_accepted":
                return "Spike accepted", f"{step}: there was no rollback, so the new level counts as normal"
            case "stall":
                waited, limit = span(event["seconds"]), span(event["limit"])
                return "Stall", f"{step}: no progress for {waited} ({event['doing']}), at most {limit} were expected"
            case "alert_sent":
                return "Alert", f"{event['kind'].replace('_', ' ')}, to {event['target']}"
            case "alert_failed":
                return "Alert not delivered", f"{event['kind'].replace('_', ' ')}, to {event['target']}: {event['reason']}"
            case "run_ended":
                return f"The run {'was ' if event['outcome'] in ('stopped', 'preempted') else 'has '}{event['outcome']}", event["reason"]
            case "finding":
                return "Finding", f"{step + ': ' if step else ''}{event['sentence']} ({event['code']})"
            case "not_finite":
                return "Not finite", f"{step}: first in {event['first']}"
            case "out_of_memory":
                used = f"{short_size(event['in_use'])} of {short_size(event['limit'])} in use"
                return "Out of memory", f"{step}, in the {event['doing']}: {used}; largest item: {event['largest']}"
            case "weights_not_finite":
                return "Weights not finite", f"{step}: not saved"
            case "rollback":
                back = f"back to step {event['to_step']:,}{skipped_steps(event.get('skip'))}"
                return "Rollback", f"{step}: {back}; {event.get('reason') or 'asked for by hand'}"
            case "corruption":
                ranks = ", ".join(map(str, event["ranks"]))
                return "Silent corruption", f"{step}: {'' if event['certain'] else 'probably '}rank {ranks}: {event['what']}"
            case "host_excluded":
                return "Host excluded", f"{event['host']}: {event['reason']}"
            case "host_started":
                cached = event.get("cached")
                ready = f", with the data of steps {cached[0]:,} to {cached[1] - 1:,} in its cache" if cached else ""
                return "Spare host started", f"{event['host']} instead of {event['instead_of']}{ready}"
            case "slow_rank":
                times = f"{span(event['seconds'])} against {span(event['median'])} of the others"
                return "Slow rank", f"{step}: rank {event['rank']}, {event['what']}: {times}"
            case "rank_exit":
                how = f"was killed by {event['signal']}" if event.get("signal") else f"ended with code {event['code']}"
                asked = " after it was asked to end" if event.get("asked") else ""
                kill = "; the kernel killed a process for want of memory" if event.get("oom_kill") else ""
                return "Rank ended", f"rank {event['rank']} on {event['host']} {how}{asked}{kill}"
            case "resumed_step":
                again = f"; {event['repeated']:.0%} of its rows were trained on before" if event["repeated"] else ""
                losses = f"loss {significant(event['loss'], 4)}, saved {significant(event['saved_loss'], 4)}"
                return "First step after resuming", f"{step}: {losses}{again}"
            case "save_failed":
                return "Save failed", f"{step}: {event['reason']}"
            case "data_starved":
                return "Waiting for data", f"{step}: {event['share']:.0%} of the time of {event['steps']:,} steps"
            case "reward_failed":
                return "Reward failed", f"{step}, grpo.data.{event['data']}: {event['reason']}"
            case "no_signal":
                return "Step without a learning signal", f"{step}: {event['reason']}"
            case "checkpoint_refused":
                return "Checkpoint refused", f"{event['path']}: {event['reason']}"
            case "bad_step":
                return "Bad step", f"{step}: loss {event['loss']}, gradient norm {event['grad_norm']}; nothing was updated"
            case "stopped":
                return "Stopped", f"{step}: {event['reason']}"
            case "budget":
                lost = f"; given up: {', '.join(event['given_up'])}" if event["given_up"] else ""
                return "Time became a budget", event["why"] + lost
            case "time":
                pairs = ((name, *pair) for name, pair in event["planned_and_actual"].items())
                return "Time", "; ".join(f"{name}: {span(planned)} planned, {span(took or 0)} taken" for name, planned, took in pairs)
            case "prediction":
                speed, seconds = event["figures"].get("perf/tokens_per_second"), event["figures"]["seconds"]
                rate = "" if speed is None else f"{compact(speed)} tokens/s, "
                return "Prediction", f"{rate}{span(seconds)} ({event['source']})"
            case "prediction_error":
                errors = (f"{name} {100 * one['error']:+.0f}%" for name, one in event["figures"].items())
                return "Error of the prediction", ", ".join(errors)
            case "recipe_changed":
                changes = [*event.get("allowed", []), *event.get("harmless", [])]
                return "Recipe changed", "; ".join(f"{c['key']}: {c['old']} to {c['new']}" for c in changes)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        pass  # a line of another version: shown as it is
    rest: dict[str, Any] = {key: value for key, value in event.items() if key not in ("time", "event")}
    return what.replace("_", " ").capitalize() or "Event", json.dumps(rest, ensure_ascii=False)[1:-1]
