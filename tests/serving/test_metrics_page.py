"""Pages of metrics: read right, whatever order and names they come in, or refused in a sentence."""

from __future__ import annotations

import random
import re
import time
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from serving import metrics_pages
from serving.metrics_pages import PretendServer, bucketed, realistic
from workbench.errors import ServingError
from workbench.serving.monitor.metrics_page import MetricsPage, read_page

RECORDED = sorted((Path(__file__).parent.parent / "data" / "metrics").glob("*.txt"))


def some_requests(server: PretendServer) -> None:
    for engine in server.engines:
        server.request([3, 0, 2], engine=engine, prompt=40, cached=16, ttft=0.03, step=0.012)
        server.request([1], engine=engine, prompt=7, ttft=1.7, step=0.4, finish="length")
        server.request([], engine=engine, ttft=5000.0)  # beyond every bucket
        server.preempt(2, engine=engine)
        server.set(running=3, waiting=1, cache=0.25, engine=engine)


def check(page: MetricsPage, server: PretendServer) -> None:
    """The page says what was counted while the requests were made."""
    assert list(page.engines) == list(server.engines)
    for name, engine in page.engines.items():
        counted = server.counted[name]
        assert engine.model == server.model
        for count, value in engine.counters.items():
            assert value == getattr(counted, count), count
        assert {k: n for k, n in engine.finished.items() if n} == dict(counted.finished)
        assert engine.accepted_at == counted.accepted_at(server.slots)
        assert engine.gauges == {"running": 3, "waiting": 1, "kv_usage": 0.25}
        for time_name, bounds in (("ttft", metrics_pages.TTFT), ("itl", metrics_pages.PER_TOKEN),
                                  ("tpot", metrics_pages.PER_TOKEN),
                                  ("e2e", metrics_pages.LATENCY)):  # fmt: skip
            histogram = engine.histograms[time_name]
            values = getattr(counted, time_name)
            assert histogram.bounds == (*bounds, inf)
            steps = [b - a for a, b in zip((0, *histogram.cumulative), histogram.cumulative,
                                           strict=False)]  # fmt: skip
            assert steps == bucketed(values, bounds)
            assert histogram.seconds == pytest.approx(sum(values))
    assert page.unusable == ()


@pytest.mark.parametrize("engines", [("0",), ("0", "1", "10", "2")])
def test_counts_are_those_of_the_requests(engines: tuple[str, ...]) -> None:
    server = PretendServer(engines=engines)
    some_requests(server)
    page = read_page(server.page())
    ordered = sorted(engines, key=int)
    assert list(page.engines) == ordered
    server.engines = tuple(ordered)
    check(page, server)
    counted = page.engines["0"].counters
    assert (counted["generation_tokens"], counted["drafts"], counted["accepted_tokens"]) == (
        (1 + 3 + 5) + (1 + 1 + 1) + 1,
        4,
        6,
    )
    assert page.started is not None
    assert abs(page.started - time.time()) < 3600


def test_a_page_is_read_as_the_library_reads_the_whole_of_it() -> None:
    server = realistic()
    text = server.page()
    assert 40 <= len(metrics_pages.families(text)) <= 46
    whole = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    labels = (("engine", "0"), ("model_name", "beam-tiny"))
    engine = read_page(text.encode()).engines["0"]
    assert engine.counters["prompt_tokens"] == whole["vllm:prompt_tokens_total", labels]
    assert engine.counters["drafts"] == whole["vllm:spec_decode_num_drafts_total", labels]
    assert engine.gauges["running"] == whole["vllm:num_requests_running", labels]
    name = "vllm:time_to_first_token_seconds"
    assert engine.histograms["ttft"].cumulative[-1] == whole[f"{name}_count", labels]
    assert engine.histograms["ttft"].seconds == whole[f"{name}_sum", labels]
    assert engine.created["ttft "] == whole[f"{name}_created", labels]


def test_without_drafts_nothing_is_said_of_them() -> None:
    server = PretendServer(slots=0)
    server.request([0, 0])
    engine = read_page(server.page()).engines["0"]
    assert not {"drafts", "draft_tokens", "accepted_tokens"} & engine.counters.keys()
    assert engine.accepted_at == ()
    assert engine.counters["generation_tokens"] == 3


def test_the_order_of_labels_and_lines_says_nothing() -> None:
    server = PretendServer(engines=("0", "1"))
    some_requests(server)
    text = server.page()
    mixed = random.Random(5)

    def shuffled(found: re.Match[str]) -> str:
        labels = re.findall(r'\w+="[^"]*"', found.group())
        mixed.shuffle(labels)
        return "{" + ",".join(labels) + "}"

    lines = re.sub(r"\{[^}]*\}", shuffled, text).splitlines()
    mixed.shuffle(lines)
    assert lines != text.splitlines()
    assert read_page("\n".join(lines) + "\n") == read_page(text)
    assert read_page(text.replace("\n", "\r\n")) == read_page(text)


def test_names_of_older_engines_count_where_there_is_no_newer_one() -> None:
    server = PretendServer()
    some_requests(server)
    text, page = server.page(), read_page(server.page())
    older = (
        text.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
        .replace("vllm:prefix_cache_", "vllm:gpu_prefix_cache_")
        .replace("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
        .replace("accepted_tokens_per_pos_total", "accepted_tokens_per_pos")
        .replace('engine="0",', "")
    )
    assert read_page(older).engines["0"].gauges == page.engines["0"].gauges
    assert read_page(older) == page
    # Both, as vLLM 0.9 had them: they are the same thing and are not added up.
    assert read_page(text + older) == page
    other = 'vllm:gpu_cache_usage_perc{engine="0",model_name="beam-tiny"} 0.9\n'
    for both in (text + other, other + text):
        assert read_page(both).engines["0"].gauges["kv_usage"] == 0.25


def test_several_models_on_one_page_are_told_apart() -> None:
    first, second = PretendServer(model="a"), PretendServer(model="b", process=False)
    some_requests(first)
    second.request([1, 1])
    page = read_page(first.page() + second.page())
    assert list(page.engines) == ["a 0", "b 0"]
    assert page.engines["a 0"].counters["drafts"] == 4
    assert page.engines["b 0"].counters["drafts"] == 2
    assert page.engines["b 0"].model == "b"


@pytest.mark.parametrize(
    "name",
    ['quo"ted', "back\\slash", "new\nline", "cur}ly{", "a,b=c", "<script>", "模型 🦊", "a # {b} 3"],
)
def test_a_name_may_be_anything(name: str) -> None:
    server = PretendServer(model=name)
    some_requests(server)
    check(read_page(server.page().encode()), server)


def test_exemplars_and_times_behind_values_are_left_out() -> None:
    server = PretendServer()
    some_requests(server)
    text = server.page()
    timed = re.sub(r"(?m)^(vllm:.*)$", r"\1 1764500000000", text)
    assert read_page(timed) == read_page(text)
    for exemplar in ('{trace_id="9f3a"} 0.67', '{trace_id="a}b # {c"} 0.67 1.5'):
        marked = re.sub(r"(?m)^(vllm:.*_bucket.*)$", rf"\1 # {exemplar}", text)
        assert marked != text
        assert read_page(marked) == read_page(text)


def test_what_is_outside_of_vllm_is_not_read_at_all() -> None:
    server = PretendServer()
    some_requests(server)
    text = server.page()
    rubbish = 'python_gc{generation="0} no number\n# TYPE http_x\nhttp{{{ 1_0\n\x00\n'
    assert read_page(rubbish + text) == read_page(text)


# -- values that are none ------------------------------------------------------------------------


def changed(text: str, series: str, value: str) -> str:
    new, count = re.subn(rf"(?m)^({re.escape(series)}) \S+$", rf"\1 {value}", text)
    assert count == 1
    return new


LABELS = 'engine="0",model_name="beam-tiny"'


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1.0", "1e308"])
def test_a_gauge_that_is_no_number_is_said_to_be_unusable(value: str) -> None:
    text = realistic().page()
    page = read_page(changed(text, f"vllm:kv_cache_usage_perc{{{LABELS}}}", value))
    assert page.unusable == ("kv_usage",)
    assert page.engines["0"].gauges == {"running": 12, "waiting": 3}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-3.0", "2.5", "9007199254740992", "1e308"])
def test_a_count_that_is_none_is_left_out_and_named(value: str) -> None:
    text = realistic().page()
    page = read_page(changed(text, f"vllm:prompt_tokens_total{{{LABELS}}}", value))
    assert page.unusable == ("prompt_tokens",)
    assert "prompt_tokens" not in page.engines["0"].counters
    assert "generation_tokens" in page.engines["0"].counters


def test_a_histogram_that_contradicts_itself_is_left_out_and_named() -> None:
    text = realistic().page()
    series = f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.02",{LABELS[11:]}}}'
    page = read_page(changed(text, series, "9999.0"))  # more than further up
    assert page.unusable == ("ttft",)
    assert "ttft" not in page.engines["0"].histograms
    total = f"vllm:time_to_first_token_seconds_sum{{{LABELS}}}"
    page = read_page(changed(text, total, "NaN"))
    assert page.engines["0"].histograms["ttft"].seconds is None
    assert page.engines["0"].histograms["ttft"].cumulative[-1] == 40


@pytest.mark.parametrize("bound", ["-Inf", "-1.0", "1e308", "NaN", "x"])
def test_a_bound_that_is_no_time_makes_a_histogram_unusable(bound: str) -> None:
    text = realistic().page().replace('le="0.001"', f'le="{bound}"')
    page = read_page(text)
    assert page.unusable == ("ttft",)
    assert "e2e" in page.engines["0"].histograms


def test_a_sum_of_times_that_is_none_is_unknown() -> None:
    series = f"vllm:time_to_first_token_seconds_sum{{{LABELS}}}"
    for value in ("1.7e308", "-1.0", "+Inf"):
        page = read_page(changed(realistic().page(), series, value))
        assert page.engines["0"].histograms["ttft"].seconds is None, value


def test_large_counts_keep_their_last_digit() -> None:
    server = PretendServer()
    server.request([], prompt=2**53 - 1)
    assert read_page(server.page()).engines["0"].counters["prompt_tokens"] == 2**53 - 1


# -- what is no page -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"<!doctype html><title>Jupyter</title>\n", "an HTML page"),
        (b'\n{"detail": "Not Found"}', "JSON"),
        (b"[1, 2]\n", "JSON"),
        (b"\x1f\x8b\x08\x00\xff\xfe binary", "bytes that are no text"),
        (b"Not Found\n", "begins 'Not Found"),
        (b"\x1b[31mred\n", r"begins '\\x1b"),
        (
            b"# TYPE python_info gauge\npython_info{version=\"3\"} 1.0\nprocess_open_fds 9\n",
            r"without one of vllm: \(it has python, process\).*--disable-log-stats",
        ),
        (b"sglang:num_running_reqs 1.0\nsglang:token_usage 0.5\n", r"it has sglang\)"),
        (b"vllm:something_new 1.0\n", "none that the monitor knows"),
        (b"vllm:num_requests_running 1.0", "was cut"),
        (b"vllm:num_requests_running{engine=\"0} 1.0\n", "labels that cannot be read"),
        (b"vllm:num_requests_running many\n", "a line that cannot be read"),
        (b"vllm:num_requests_running\n", "a line that cannot be read"),
        (b"vllm:num_requests_running 1_0\n", "a line that cannot be read"),
        (b"vllm:num_requests_running 1 2 3\n", "a line that cannot be read"),
    ],
)  # fmt: skip
def test_what_came_instead_is_said_in_one_sentence(page: bytes, words: str) -> None:
    with pytest.raises(ServingError, match=words) as caught:
        read_page(page, where="http://127.0.0.1:8000/metrics")
    said = str(caught.value)
    assert said.startswith("http://127.0.0.1:8000/metrics ")
    assert said.isprintable()
    assert len(said) < 300


def test_more_engines_or_letters_than_a_page_has_are_refused() -> None:
    line = 'vllm:num_requests_running{engine="%s"} 1\n'
    with pytest.raises(ServingError, match="1,025 engines"):
        read_page("".join(line % number for number in range(1025)))
    assert len(read_page("".join(line % number for number in range(64))).engines) == 64
    with pytest.raises(ServingError, match="labels that cannot be read") as caught:
        read_page(line % ("x" * 10**6))  # they would be kept
    assert len(str(caught.value)) < 200


def test_more_series_than_any_engine_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = realistic().page()
    monkeypatch.setattr("workbench.serving.monitor.metrics_page.MOST_SERIES", 50)
    with pytest.raises(ServingError, match="more than 50 series"):
        read_page(text)


PAGE = realistic(("0", "1")).page()
WHOLE = read_page(PAGE)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(PAGE) - 1))
def test_a_page_cut_anywhere_is_refused_or_says_nothing_wrong(end: int) -> None:
    """Between two metrics nobody can tell a cut: what is there then holds."""
    try:
        page = read_page(PAGE[:end])
    except ServingError:
        return
    assert PAGE[end - 1] == "\n"
    for name, engine in page.engines.items():
        whole = WHOLE.engines[name]
        for part in ("counters", "gauges", "histograms", "finished", "created"):
            assert getattr(engine, part).items() <= getattr(whole, part).items()
        assert whole.accepted_at[: len(engine.accepted_at)] == engine.accepted_at


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=300), st.sampled_from(["", "vllm:", "vllm:num_requests_running{"]))
def test_no_text_makes_it_fail_in_another_way(text: str, start: str) -> None:
    said = ""
    try:
        read_page(start + text)
    except ServingError as error:
        said = str(error)
    assert said == "" or said.isprintable()


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_pages_of_real_servers_are_read(path: Path) -> None:
    """What is checked holds of any server; the files say nothing of what was asked of it."""
    text = path.read_text("utf-8")
    page = read_page(text)
    assert page.engines
    assert page.unusable == ()
    lines = text.splitlines()
    for engine in page.engines.values():
        for name in ("prompt_tokens", "generation_tokens", "preemptions"):
            assert name in engine.counters
        assert engine.gauges.keys() == {"running", "waiting", "kv_usage"}
        assert {"ttft", "itl", "e2e"} <= engine.histograms.keys()
        drafts = engine.counters.get("drafts")
        assert (drafts is not None) == any("spec_decode_num_drafts" in line for line in lines)
        if drafts is not None:
            assert engine.counters["accepted_tokens"] == sum(engine.accepted_at)
            assert list(engine.accepted_at) == sorted(engine.accepted_at, reverse=True)


def test_a_page_that_was_read_before_is_cheap() -> None:
    """Reading 43 metrics of one engine; the bound of a whole scrape is in test_monitor.py."""
    pages = [realistic().page().encode() for _ in range(2)]
    for page in pages:
        read_page(page)
    begin = time.process_time()
    for _ in range(20):
        for page in pages:
            read_page(page)
    assert (time.process_time() - begin) / 40 < 0.010
