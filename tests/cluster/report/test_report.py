"""The files of a report: complete, self-contained, and readable."""

import csv
import json
import re
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from outcomes import failed, outcome, run, simulated

from cluster.errors import ClusterError
from cluster.replay.outcome import ResultWriter, RunEnd
from cluster.report.command import report
from cluster.report.definitions import DEFINITIONS
from cluster.report.figures import Bootstrap
from cluster.report.files import write_report
from cluster.report.prices import parse_prices

FEW = Bootstrap(num_resamples=20)
VOID = {"meta"}


class Reader(HTMLParser):
    """Text of a page; refuses tags that do not nest and anything fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            assert name not in ("src", "href", "srcset"), (tag, name, value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def read(html: str) -> str:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    assert "url(" not in html
    assert "@import" not in html
    return re.sub(r"\s+", " ", " ".join(reader.text))


def test_a_report_stands_on_its_own(tmp_path):
    outcomes = simulated(200, rate=6.0, tiers={"default": 0.8, "batch": 0.2}, patience_s=2.0)
    made = run(
        label="evening <peak>",
        command=("tailrace", "replay", "trace.jsonl"),
        versions={"tailrace": "9.8.7"},
        machine={"cpu": "A Processor", "cores": 2},
        settings={"timeout_s": 60},
        rate=6.0,
    )
    files = write_report(
        tmp_path / "out", made, outcomes, prices=parse_prices(["cpu=0.25x2"]), bootstrap=FEW
    )
    text = read(files.html.read_text())
    for said in (
        *("evening <peak>", "tailrace replay trace.jsonl", "9.8.7", "A Processor", "timeout s"),
        *("Tier batch", "0.25", "shed", "Goodput", "TTFT over time", "Figures of this plot"),
        *(each.title for each in DEFINITIONS),
    ):
        assert said in text, said
    assert "prefers-color-scheme:dark" in files.html.read_text()
    summary = json.loads(files.json.read_text())
    assert summary["all"]["requests"]["offered"] == 200
    assert [each["key"] for each in summary["definitions"]] == [each.key for each in DEFINITIONS]


@pytest.mark.parametrize(
    "outcomes", [[], [outcome()], [failed(i, "error") for i in range(3)]], ids=["0", "1", "failed"]
)
def test_a_report_of_next_to_nothing_is_still_a_page(tmp_path, outcomes):
    files = write_report(tmp_path, run(end=None), outcomes, bootstrap=FEW)
    assert "The run was cut off" in read(files.html.read_text())


def test_what_to_doubt_is_said(tmp_path):
    late = [outcome(i, sent_s=i + 0.5) for i in range(20)]
    end = RunEnd(
        duration_s=10.0, num_outcomes=20, interrupted=True, num_unfinished=3, client_cpu_s=9.0
    )
    text = read(write_report(tmp_path, run(end=end), late, bootstrap=FEW).html.read_text())
    assert "3 requests of the schedule have no outcome" in text
    assert "p99 of its schedule lateness is 500 ms" in text
    assert "The client used 0.90 CPUs" in text
    assert "Only 20 answers" in text


def test_the_table_of_outcomes_has_a_line_a_request(tmp_path):
    outcomes = [outcome(0, phases={"queue": 0.25}), failed(1, "shed", code="overloaded")]
    files = write_report(tmp_path, run(), outcomes, bootstrap=FEW)
    with files.csv.open() as file:
        first, second = csv.DictReader(file)
    assert (first["ttft_s"], first["itl_s"], first["good"]) == ("0.1", "0.05", "1")
    assert first["phase_queue_s"] == "0.25"
    assert (second["result"], second["code"], second["ttft_s"], second["good"]) == (
        *("shed", "overloaded"),
        *("", "0"),
    )


def test_samples_of_the_pools_are_drawn_and_kept(tmp_path):
    samples = [{"at_s": float(i), "running": {"decode r1": i}, "kv_usage": {}} for i in range(200)]
    files = write_report(tmp_path, run(), [outcome()], bootstrap=FEW, pools=samples)
    text = read(files.html.read_text())
    assert "Requests running in the engines" in text
    assert "decode r1" in text
    assert json.loads(files.json.read_text())["pools"][7]["running"] == {"decode r1": 7}


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ClusterError, match="taken"):
        write_report(tmp_path / "taken", run(), [outcome()], bootstrap=FEW)


def test_the_command_makes_a_report_of_a_raw_result(tmp_path):
    path = tmp_path / "evening.jsonl"
    with path.open("wb") as file:
        writer = ResultWriter(file, run(end=None))
        for i in range(12):
            writer.outcome(outcome(i))
        writer.end(RunEnd(duration_s=12.0, num_outcomes=12))
    done = CliRunner().invoke(report, [str(path), "--json", "--slo", "*:ttft=0.05"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["all"]["goodput"]["value"] == 0.0
    assert said["files"]["html"] == str(tmp_path / "evening-report" / "report.html")
    assert (tmp_path / "evening-report" / "report.html").exists()
