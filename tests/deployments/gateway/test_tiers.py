import pytest

from deployments.gateway.config import GatewayConfig
from deployments.gateway.tiers import served_tier, standard_tiers
from engine.errors import RequestError

TIERS = standard_tiers()
PATH = "/v1/completions"


def body(**fields):
    return {"model": "tiny", "prompt": "a b", "max_tokens": 4, **fields}


@pytest.mark.parametrize(
    ("asked", "allowed", "served"),
    [
        (None, None, "default"),
        ("auto", None, "default"),
        ("scale", None, "default"),
        ("fast", None, "priority"),
        ("priority", None, "priority"),
        ("batch", None, "batch"),
        (None, ("flex", "batch"), "flex"),
        ("auto", ("flex", "batch"), "flex"),
        ("batch", ("flex", "batch"), "batch"),
        ("priority", ("flex", "batch"), "flex"),
        ("fast", ("flex",), "flex"),
        (None, ("gone", "batch"), "batch"),
    ],
)
def test_what_a_request_gets(asked, allowed, served):
    assert served_tier(asked, TIERS, allowed) == served


@pytest.mark.parametrize("allowed", [("gone",), ()])
@pytest.mark.parametrize("asked", [None, "auto", "default", "priority", "flex"])
def test_a_key_whose_tiers_are_all_gone_gets_none(asked, allowed):
    """As when a file of keys misspells `batch`, or a key and its tenant have no tier in common."""
    with pytest.raises(RequestError, match="may use none of the tiers") as raised:
        served_tier(asked, TIERS, allowed)
    assert raised.value.status == 403


def test_a_name_that_is_no_tier_is_refused_with_those_there_are():
    with pytest.raises(RequestError, match=r"service_tier='gold'.*priority, default, flex, batch"):
        served_tier("gold", TIERS, None)


def test_one_of_openais_names_that_is_not_offered_falls_back():
    assert served_tier("flex", {"default", "gold"}, None) == "default"


def test_the_queue_hears_of_the_table():
    tiers, limits = GatewayConfig.parse(
        {"revision": 7, "tiers": {"default": {"rank": 3, "max_wait_s": 5}}}
    ).policy()
    assert tiers.revision == 7
    assert tiers.rule("default", 0).rank == 3
    assert limits.max_wait_s == 5


async def test_the_tier_orders_the_request_and_is_told_in_the_answer(gateway):
    for asked, served, rank in (
        ("flex", "flex", 20),
        ("fast", "priority", 0),
        (None, "default", 10),
    ):
        extra = {} if asked is None else {"service_tier": asked}
        answer = await gateway.post(PATH, body(**extra))
        assert answer.json()["service_tier"] == served
        request, place = gateway.backend.opened[-1][1], gateway.backend.places[-1]
        assert (request.priority, place.tier) == (rank, served)
        target = TIERS[served].itl_s
        assert request.itl_target_ms == round(1000 * target)
        assert place.due_s is not None
        assert request.preemptible is (served != "priority")
