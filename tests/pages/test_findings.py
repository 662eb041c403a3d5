"""The doctor's findings on the run page: a section, marks on charts, and the timeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_runs import HOSTILE

from lmworks.pages.read_run import read_run
from lmworks.pages.run_page import render, write_page
from written_run import write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FULL = {"event": "save_failed", "step": 30, "reason": "[Errno 28] No space left on device", "in_a_row": 1}
NAMED = {"event": "finding", "step": 40, "code": "bad-batch", "sentence": f"A batch makes the gradient not finite. {HOSTILE}"}


@pytest.fixture
def full(tmp_path: Path) -> Path:
    again = {"event": "finding", "step": 35, "code": "disk-full", "sentence": "A checkpoint could not be saved because the disk was full."}
    return write_run(tmp_path / "run", {"train/loss": [5.0 - 0.01 * i for i in range(60)]}, [FULL, again, NAMED])


def test_a_finding_has_a_section_with_evidence_and_change_and_marks_at_its_step(full: Path) -> None:
    run = read_run(full)
    (found,) = [one for one in run.findings if one["kind"] == "problem"]
    assert found["code"] == "disk-full" and found["where"] == "Pretraining, step 30"
    assert found["evidence"] == [("saves that failed on a full disk", "1", "at most 0", "the error of the operating system", True)]
    marks = [(mark.step, mark.text.split(":")[0]) for mark in run.pretrain.marks if mark.kind == "finding"]
    assert marks == [(40, "bad-batch"), (30, "disk-full")], "what the ledger and the diagnosis both name is marked once"
    text = render(run)
    assert 'href="#findings"' in text and "--set checkpoints.keep_last=1" in text and "named by the doctor" in text
    assert "A batch makes the gradient not finite." in text.partition('id="ledger"')[2] and "<script>window.hacked" not in text


def test_a_healthy_run_has_no_section_and_damaged_records_end_no_page(tmp_path: Path) -> None:
    healthy = write_run(tmp_path / "healthy", {"train/loss": [5.0 - 0.01 * i for i in range(60)]})
    assert 'id="findings"' not in render(read_run(healthy))
    events = [FULL | {"step": 10**400, "stage": []}, {"event": "finding", "step": []}]
    damaged = write_run(tmp_path / "damaged", {"train/loss": [1.0]}, events)
    (damaged / "metrics.jsonl").unlink()
    (damaged / "metrics.jsonl").mkdir()
    assert "written" in render(read_run(damaged))


@pytest.mark.parametrize("width", [1400, 400])
def test_a_mark_of_the_doctor_says_what_it_is(browser: Browser, full: Path, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.goto(write_page(full).as_uri())
    page.locator("#pretrain-loss .plot").focus()
    page.locator("#pretrain-loss .u-over").scroll_into_view_if_needed()
    box = page.locator("#pretrain-loss .u-over").bounding_box()
    assert box and page.locator("#pretrain-loss .mark.finding").count() == 2
    page.mouse.move(box["x"] + box["width"] * 29 / 59, box["y"] + 60)
    assert "disk-full: A checkpoint could not be saved" in page.locator("#pretrain-loss .chip").inner_text()
    assert page.locator("#findings").get_by_text("make room on the file system").is_visible()
    context.close()
