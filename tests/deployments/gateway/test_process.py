from pathlib import Path

import pytest

from deployments.gateway.process import GatewayProcess
from engine.errors import ConfigError


async def test_a_refused_configuration_leaves_limits_and_request_log_where_they_were(
    tmp_path: Path,
) -> None:
    process = GatewayProcess("gateway", b"x" * 32)
    refused = {
        "limits_store": "redis://127.0.0.1:1/0",
        "request_log": {"path": str(tmp_path / "requests.jsonl")},
        "keys_file": str(tmp_path / "missing.yaml"),
    }
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        await process.apply(refused)
    assert process.state.quotas._url is None
    assert process._request_log.path is None
    assert process.state.request_log is None
    await process.close()
