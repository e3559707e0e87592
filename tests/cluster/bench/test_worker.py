from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cluster.bench.loads import Ask
from cluster.bench.worker import Worker
from cluster.errors import ClusterError


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["max_tokens"] > 100:
            refusal = b'{"error":{"message":"too many tokens"}}'
            self.send_response(400)
            self.send_header("content-length", str(len(refusal)))
            self.end_headers()
            self.wfile.write(refusal)
            return
        choice = {"index": 0, "text": body["prompt"], "finish_reason": "length"}
        usage = {
            "prompt_tokens": 3,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        stream = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(stream), stream.encode()))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(prompt: str, max_tokens: int = 2) -> Ask:
    return Ask(body={"prompt": prompt, "max_tokens": max_tokens}, max_tokens=max_tokens)


def test_a_worker_puts_load_on_a_server_and_on_an_engine_and_tells_what_failed(url):
    with Worker({"OMP_NUM_THREADS": "1"}) as worker:
        worker.server(url)
        load = worker.closed("server", [ask("a"), ask("b"), ask("c")], 2)
        assert [result["text"] for result in load.results] == ["a", "b", "c"]
        assert [result["completion_tokens"] for result in load.results] == [2, 2, 2]
        assert load.wall_s >= max(result["e2e_s"] for result in load.results)
        burst = worker.arrivals("server", [ask("x"), ask("y")], 0.0)
        assert [result["text"] for result in burst.results] == ["x", "y"]
        with pytest.raises(ClusterError, match=r"1 of 2 requests failed.*too many tokens"):
            worker.closed("server", [ask("a"), ask("b", 101)], 1)

        args = {"name": "m", "source": "fake", "num_threads": 1, "num_blocks": 64}
        assert worker.engine(args, None) == {"threads": 1, "dtype": "float64"}
        asks = [Ask(prompt_ids=tuple(range(1, 20 + i)), max_tokens=5) for i in range(4)]
        alone = worker.closed("engine", asks, 1).results
        together = worker.arrivals("engine", asks, 0.0).results
        assert [result["completion_tokens"] for result in alone] == [5, 5, 5, 5]
        assert [result["text"] for result in together] == [result["text"] for result in alone]
        with pytest.raises(ClusterError, match="not in the vocabulary"):
            worker.closed("engine", [Ask(prompt_ids=(9_999_999,), max_tokens=2)], 1)
        with pytest.raises(ClusterError, match="no such file"):
            worker.engine({"name": "m", "source": "/nowhere/model"}, None)


def test_a_worker_that_died_is_said():
    with Worker() as worker:
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match="ended with status -9"):
            worker.server("http://127.0.0.1:1")
