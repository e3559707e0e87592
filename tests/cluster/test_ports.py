from __future__ import annotations

import os
import socket

import pytest

from cluster.errors import PortBusy
from cluster.ports import check_free, free_ports, free_range
from engine.errors import ConfigError


def test_a_busy_port_names_itself_its_holder_and_the_way_out():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortBusy) as caught:
            check_free("127.0.0.1", port, setting="http_options.port", way_out="use --port")
    message = str(caught.value)
    assert message.startswith(f"http_options.port={port}: port {port} on 127.0.0.1 is taken by ")
    assert f"(pid {os.getpid()})" in message
    assert message.endswith("; use --port")


def test_a_listener_on_every_interface_takes_the_port_of_each():
    with socket.create_server(("0.0.0.0", 0)) as server, pytest.raises(PortBusy):
        check_free("127.0.0.1", server.getsockname()[1], setting="x", way_out="y")


def test_a_free_port_passes():
    (port,) = free_ports(1)
    check_free("127.0.0.1", port, setting="x", way_out="y")


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(
        ConfigError, match=r"http_options\.host='198\.51\.100\.1'.*use 127\.0\.0\.1"
    ):
        check_free("198.51.100.1", free_ports(1)[0], setting="x", way_out="y")


def test_free_ports_are_different_and_can_be_listened_on():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_range_is_consecutive_and_avoids_what_is_given_away():
    first, last = free_range(50, avoid=[])
    assert last - first == 49
    avoid = list(range(20000, 31900))
    first, last = free_range(50, avoid=avoid)
    assert first >= 31900
    assert last < 32000
