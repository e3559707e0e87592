from __future__ import annotations

import random
from email.utils import formatdate

import httpx2
import openai
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.replay.retry import RetryPolicy

NOW = 1_800_000_000.0
CLIENT = openai.OpenAI(api_key="unused", max_retries=3)

waits = st.sampled_from(
    ["0", "1", "2.5", "119", "120", "121", "-3", "soon", "nan", "inf", "1e400", ""]
)
headers_of = st.fixed_dictionaries(
    {},
    optional={
        "retry-after": waits | st.just(formatdate(NOW + 30)) | st.just(formatdate(NOW - 30)),
        "retry-after-ms": waits | st.just("1500"),
        "x-should-retry": st.sampled_from(["true", "false", "maybe"]),
    },
)


@given(
    status=st.sampled_from([400, 401, 404, 408, 409, 422, 429, 500, 503, 504]),
    headers=headers_of,
    taken=st.integers(0, 3),
    seed=st.integers(0, 5),
)
@example(status=429, headers={"retry-after": "600"}, taken=0, seed=0)
@example(status=400, headers={"x-should-retry": "true"}, taken=0, seed=0)
def test_it_decides_as_the_openai_client_does(status, headers, taken, seed):
    with pytest.MonkeyPatch.context() as patch:
        rng = random.Random(seed)
        patch.setattr("openai._base_client.random", rng.random)
        patch.setattr("openai._base_client.time.time", lambda: NOW)
        response = httpx2.Response(status, headers=headers)
        expected = None
        if taken < 3 and CLIENT._should_retry(response):
            options = openai._models.FinalRequestOptions(method="post", url="/x")
            expected = CLIENT._calculate_retry_timeout(3 - taken, options, response.headers)
    delay = RetryPolicy(3).delay_s(taken, status, headers, now_unix_s=NOW, rng=random.Random(seed))
    assert delay == expected


def test_a_broken_connection_is_tried_again_and_none_is_without_retries():
    rng = random.Random(1)
    delay = RetryPolicy(1).delay_s(0, None, {}, now_unix_s=NOW, rng=rng)
    assert delay is not None
    assert 0.375 <= delay <= 0.5
    assert RetryPolicy(1).delay_s(1, None, {}, now_unix_s=NOW, rng=rng) is None
    assert RetryPolicy().delay_s(0, 503, {}, now_unix_s=NOW, rng=rng) is None
