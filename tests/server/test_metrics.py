"""What /metrics tells: in Prometheus's form, of the pool as it is, under our names and vLLM's (FC-32)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import CHAIN, Server, wait_until

DASHBOARD = Path(__file__).parent / "../../docs/grafana.json"
PAGES = 256
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(CHAIN, "--num-blocks", str(PAGES), "--no-dynamic", "-c", "2048") as running:
        yield running


def complete(server: Server, prompt: str, max_tokens: int, **more: Any) -> Any:
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        **more,
    }
    return server.post("/v1/completions", body).ok()


def value(metrics: Any, name: str, **labels: str) -> float:
    """The one sample with these labels, and whatever others it has."""
    found = [v for key, v in metrics[name].items() if labels.items() <= dict(key).items()]
    assert len(found) == 1, (name, labels, found)
    return float(found[0])


def pages(metrics: Any) -> dict[str, float]:
    return {
        state: value(metrics, "pagedkv_pool_pages", state=state)
        for state in ("free", "held", "cached")
    }


def test_is_what_prometheus_reads(server: Server) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    complete(server, "ABC", 20)
    answer = server.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(parser.text_string_to_metric_families(answer.text))
    assert len({f.name for f in families}) == len(families)
    for family in families:
        assert family.name.startswith(("pagedkv_", "vllm:")), family.name
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family
        assert family.samples, family.name
        for sample in family.samples:
            assert sample.value == sample.value and sample.value >= 0, sample
            assert ("total" in sample.name.split("_")) == (family.type == "counter"), sample
    assert server.metrics()  # and by the harness's own parser


def test_histograms_add_up(server: Server) -> None:
    complete(server, "ABC", 20)
    metrics = server.metrics()
    names = [name.removesuffix("_bucket") for name in metrics if name.endswith("_bucket")]
    assert {"pagedkv_time_to_first_token_seconds", "pagedkv_inter_token_latency_seconds"} <= set(
        names
    )
    for name in names:
        buckets = sorted(
            (float(dict(key)["le"]), count) for key, count in metrics[f"{name}_bucket"].items()
        )
        counts = [count for _, count in buckets]
        assert counts == sorted(counts) and buckets[-1][0] == float("inf"), name
        assert counts[-1] == next(iter(metrics[f"{name}_count"].values())), name


def test_a_request_of_500_tokens_holds_32_of_256_pages(server: Server) -> None:
    seen: list[float] = []

    def request_until_seen() -> bool:
        # The text is the same each time: what earlier rounds left in the cache is held again.
        thread = threading.Thread(
            target=complete, args=(server, LETTERS * 18 + "ABCDEFGHIJKLMNOPQRST", 12)
        )
        thread.start()
        while thread.is_alive():
            metrics = server.metrics()
            now = pages(metrics)
            assert sum(now.values()) == PAGES
            if now["held"] > 30:  # its prompt is there
                seen.append(now["held"])
                assert value(metrics, "pagedkv_usage_ratio") == now["held"] / PAGES
                assert value(metrics, "pagedkv_requests_running") == 1
        thread.join()
        return len(seen) >= 3

    wait_until(request_until_seen, "the request at work")
    assert all(31 <= held <= 33 for held in seen), seen
    idle = wait_until(lambda: server.metrics(), "metrics")
    assert pages(idle)["held"] == 0
    assert pages(idle)["cached"] >= 31
    assert sum(pages(idle).values()) == PAGES
    assert value(idle, "pagedkv_usage_ratio") == 0


def test_pages_sum_to_the_committed_ones_while_requests_run() -> None:
    with Server(CHAIN, "--max-num-seqs", "8") as server:
        done = threading.Event()

        def ask(number: int) -> None:
            for i in range(6):
                complete(server, LETTERS[number : number + 1] * (50 * i + 7), 40)

        def watch() -> None:
            threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            done.set()

        runner = threading.Thread(target=watch)
        runner.start()
        most = 0.0
        while not done.is_set():
            pool = server.get("/v1/kv/pool").ok()
            for group in pool["groups"]:
                states = group["pages"]
                assert states["free"] + states["held"] + states["cached"] == states["committed"], (
                    pool
                )
                assert states["shared"] <= states["held"] <= states["peak"] <= states["limit"], pool
            assert sum(g["bytes"] for g in pool["groups"]) == pool["bytes"]["committed"], pool
            metrics = server.metrics()
            now = pages(metrics)
            page_bytes = pool["groups"][0]["page_bytes"]
            committed = value(metrics, "pagedkv_pool_bytes", kind="committed")
            assert sum(now.values()) * page_bytes == committed
            most = max(most, now["held"])
        runner.join()
        assert most > 0
        assert pages(server.metrics())["held"] == 0


def test_vllms_names_have_the_same_values(server: Server) -> None:
    complete(server, LETTERS * 3, 5)
    again = complete(server, LETTERS * 3, 5)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 77
    m = server.metrics()
    same = {
        "vllm:num_requests_running": "pagedkv_requests_running",
        "vllm:num_requests_waiting": "pagedkv_requests_waiting",
        "vllm:kv_cache_usage_perc": "pagedkv_usage_ratio",
        "vllm:prefix_cache_queries_total": "pagedkv_prefix_query_tokens_total",
        "vllm:prefix_cache_hits_total": "pagedkv_prefix_hit_tokens_total",
        "vllm:num_preemptions_total": "pagedkv_preemptions_total",
        "vllm:generation_tokens_total": "pagedkv_generation_tokens_total",
        "vllm:time_to_first_token_seconds_count": "pagedkv_time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_sum": "pagedkv_inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_count": "pagedkv_request_duration_seconds_count",
    }
    for theirs, ours in same.items():
        assert value(m, theirs) == value(m, ours), theirs
        assert dict(next(iter(m[theirs]))) == {"model_name": server.model, "engine": "0"}, theirs
    assert value(m, "vllm:prompt_tokens_total") == sum(
        m["pagedkv_request_prompt_tokens_total"].values()
    )
    assert sum(m["vllm:request_success_total"].values()) == sum(
        m["pagedkv_requests_finished_total"].values()
    )
    info = dict(next(iter(m["vllm:cache_config_info"])))
    assert (info["block_size"], info["num_gpu_blocks"]) == ("16", str(PAGES))


def test_vllms_names_can_be_left_out() -> None:
    with Server("toy:", "--metrics-compat", "none") as server:
        assert not [name for name in server.metrics() if not name.startswith("pagedkv_")]


def test_wants_the_key_unless_it_is_public() -> None:
    with Server("toy:", "--api-key", "right", key="right") as server:
        assert server.metrics()
        assert server.get("/metrics", key=None).error(401)
    with Server("toy:", "--api-key", "right", "--metrics-public", key=None) as server:
        assert server.get("/metrics").status == 200
        assert server.get("/v1/models").error(401)


def test_labels_are_few_whatever_is_asked(server: Server) -> None:
    def samples() -> dict[str, int]:
        return {name: len(found) for name, found in server.metrics().items()}

    before = samples()
    for i in range(5):
        complete(server, LETTERS, 2, cache_salt=f"salt{i}", user=f"user{i}")
        server.post("/v1/completions", {"model": f"unknown{i}", "prompt": "A"}).error(404)
    assert samples() == before
    assert "salt0" not in server.get("/metrics").text


def test_the_dashboard_asks_for_what_there_is(server: Server) -> None:
    served = set(server.metrics())
    queries = re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', DASHBOARD.read_text())
    assert len(queries) > 8
    for query in queries:
        names = re.findall(r"(?:pagedkv_|vllm:)\w+", query)
        assert names and set(names) <= served, (query, set(names) - served)


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    places = []
    for panel in dashboard["panels"]:
        assert panel["title"] and panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"], panel["title"]
        at = panel["gridPos"]
        places += [
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        ]
    assert len(places) == len(set(places)), "panels lie over each other"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
