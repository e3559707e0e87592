from __future__ import annotations

import pytest

from cluster.errors import DeployFailed
from cluster.serve_api import Application, Deployment, explain, raise_if_failed

# As Serve 2.60 writes them, with the frames in the middle cut out.
CONSTRUCTOR = """\
The deployment failed to start 3 times in a row. This may be due to a problem with its constructor \
or initial health check failing. See controller logs for details. Error:
\x1b[36mray::ServeReplica:g:Sad.initialize_and_get_metadata()\x1b[39m (pid=9, ip=127.0.0.1)
  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 449, in result
    return self.__get_result()
ValueError: weights are made of cheese: 3 of 4 slices

The above exception was the direct cause of the following exception:

\x1b[36mray::ServeReplica:g:Sad.initialize_and_get_metadata()\x1b[39m (pid=9, ip=127.0.0.1)
  File "/usr/lib/python3.11/site-packages/ray/serve/_private/replica.py", line 1205, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/ray/serve/_private/replica.py", line 1172, in initialize
    self._user_callable_asgi_app = await self._user_callable_wrapper.initialize_callable()
  File "/srv/app.py", line 21, in __init__
    raise ConfigError("model file cut short:\\n12 bytes of 91 MB")
engine.errors.ConfigError: model file cut short:
12 bytes of 91 MB"""

BUILDER = """\
Deploying app 'g' failed with exception:
Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/ray/serve/_private/application_state.py", line 1, in build
    app = call_user_app_builder_with_args_if_necessary(
  File "/srv/app.py", line 24, in raising
    def raising(args): raise RuntimeError("cannot build: args say no")
RuntimeError: cannot build: args say no
"""


def application(status: str, *, deployed_s: float = 10.0, message: str = "") -> Application:
    return Application("a", status, message, "/", (), deployed_s)


def test_a_replicas_own_exception_is_found_inside_two_tracebacks():
    first, cause = explain(CONSTRUCTOR).splitlines()
    assert first.startswith("The deployment failed to start 3 times in a row.")
    assert cause == "ConfigError: model file cut short: 12 bytes of 91 MB"


def test_a_builders_exception_is_found():
    assert explain(BUILDER) == (
        "Deploying app 'g' failed with exception:\nRuntimeError: cannot build: args say no"
    )


def test_words_without_a_traceback_stay_as_they_are():
    assert explain("Needs 3 CPUs: there are 2\n\n") == "Needs 3 CPUs: there are 2"


def test_a_traceback_without_a_known_name_keeps_its_last_line():
    text = 'Traceback (most recent call last):\n  File "x", line 1\nStopIteration\n'
    assert explain(text) == "StopIteration"


def test_a_failed_application_raises_what_its_deployment_says():
    failed = Application(
        "a", "DEPLOY_FAILED", "see D", "/", (Deployment("D", "X", "no such file", 1, ()),), 10.0
    )
    with pytest.raises(DeployFailed, match="application 'a' is DEPLOY_FAILED: no such file"):
        raise_if_failed([failed], since_s=9.0)


def test_a_failure_of_the_deployment_before_does_not_count():
    raise_if_failed([application("DEPLOY_FAILED", deployed_s=8.0)], since_s=9.0)


def test_an_application_that_starts_is_no_failure():
    raise_if_failed([application("DEPLOYING"), application("RUNNING")], since_s=9.0)
