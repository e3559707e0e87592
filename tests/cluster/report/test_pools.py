import http.server
import threading
import time

from cluster.report.pools import PoolSampler, parse

TEXT = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="a",replica="r1"} 3
vllm:num_requests_running{model_name="b",replica="r1"} 2
vllm:num_requests_waiting{model_name="a",replica="r2"} 1
vllm:kv_cache_usage_perc{model_name="a",replica="r1"} 0.25
vllm:prompt_tokens_total{model_name="a"} 7
vllm:num_requests_waiting 4
"""


def test_figures_are_by_replica_under_readable_names():
    assert parse(TEXT, {"r1": "Decode 1"}) == {
        "running": {"Decode 1": 5.0},
        "waiting": {"r2": 1.0, "": 4.0},
        "kv_usage": {"Decode 1": 0.25},
    }


def serve(status: int) -> http.server.HTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/metrics" else 500)
            self.end_headers()
            self.wfile.write(TEXT.encode())

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_a_sampler_reads_until_it_is_left():
    server = serve(200)
    with PoolSampler(f"http://127.0.0.1:{server.server_port}/v1", every_s=0.01) as sampler:
        deadline = time.monotonic() + 240
        while len(sampler.samples) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    taken = len(sampler.samples)
    assert taken >= 3
    assert sampler.samples[0]["running"] == {"r1": 5.0}
    last = sampler.samples[-1]["at_s"]
    late = sampler.during(sampler._span_s - last + 1e-9)
    assert [each["at_s"] for each in late] == [0.0]
    assert len(sampler.during(1e9)) == taken
    assert [each["at_s"] for each in sampler.samples] == sorted(
        each["at_s"] for each in sampler.samples
    )
    server.shutdown()
    server.server_close()


def test_a_server_without_metrics_gives_no_samples():
    server = serve(404)
    with PoolSampler(f"http://127.0.0.1:{server.server_port}", every_s=0.01) as sampler:
        sampler._thread.join(240)
        assert not sampler._thread.is_alive()
    assert sampler.samples == []
    server.shutdown()
    server.server_close()
