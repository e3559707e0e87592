from __future__ import annotations

import pytest

from cluster.replay.mix import parse_mix
from engine.errors import ConfigError


def test_a_mix_on_one_line():
    conv, arxiv, rest = parse_mix("conv=0.7:default, arxiv=0.3:batch,code")
    assert (conv.source, conv.share, conv.tier) == ("conv", 0.7, "default")
    assert (arxiv.source, arxiv.share, arxiv.tier) == ("arxiv", 0.3, "batch")
    assert (rest.source, rest.share, rest.tier) == ("code", 1.0, None)


def test_a_mix_in_a_file(tmp_path):
    path = tmp_path / "mix.yaml"
    path.write_text(
        "parts:\n- {source: conv, tenants: [a, b], sampling: {temperature: 0.7}, turns: 3}\n"
    )
    (part,) = parse_mix(str(path))
    assert part.tenants == ("a", "b")
    assert (part.sampling, part.turns, part.fixed_length) == ({"temperature": 0.7}, 3, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("conv=x", "the share 'x' must be a number"),
        ("conv=0", "share=0.0: input should be greater than 0"),
        ("conv=nan", "share=nan"),
        ("conv=1:gold", "tier='gold': there are priority, default, flex, batch"),
        ("=1", "source=''"),
        ("none.yaml", "No such file"),
    ],
)
def test_a_bad_mix_is_refused_with_its_value(text, message):
    with pytest.raises(ConfigError) as refused:
        parse_mix(text)
    assert message in str(refused.value)


def test_a_misspelt_field_of_a_part_is_no_news_to_nobody(tmp_path):
    path = tmp_path / "mix.yaml"
    path.write_text("- {source: conv, tenant: a}\n")
    with pytest.raises(ConfigError, match=r"tenant='a': no such field; here are .*tenants"):
        parse_mix(str(path))
