"""Finding the library, and doing without it."""

import logging
import shutil

import pytest
import torch

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.models import load
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.native import library
from engine.native.decoder import NativeDecoder
from engine.native.library import NativeUnavailable, load_library, native_available

TINY = {"name": "m", "source": "tiny", "dtype": "float32"}
needs_library = pytest.mark.skipif(native_available("float32") is not None, reason="not built")


@pytest.fixture
def without(monkeypatch):
    monkeypatch.setattr(library, "library_path", lambda: None)


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_it_is_built_where_there_is_a_compiler():
    assert native_available("float32") is None


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_takes_it_for_the_dtypes_of_serving(dtype):
    if library.variants(dtype) == ("portable",):
        pytest.skip("no vector instructions are known")
    model = load_model(ModelConfig(name="m", source="tiny", dtype=dtype), num_threads=1)
    assert isinstance(model, NativeDecoder)
    assert model.num_threads == 1


@needs_library
def test_float64_is_torchs_unless_asked_for():
    assert isinstance(load_model(ModelConfig(name="m", source="tiny")), Decoder)
    asked = load_model(ModelConfig(name="m", source="tiny", backend="native"))
    assert isinstance(asked, NativeDecoder)
    assert asked.layout == load_model(ModelConfig(name="m", source="tiny")).layout


@needs_library
def test_portable_code_alone_is_not_taken_unasked(monkeypatch):
    monkeypatch.setattr(load, "variants", lambda dtype: ("portable",))
    assert isinstance(load_model(ModelConfig(**TINY)), Decoder)


@needs_library
def test_torch_can_be_asked_for(caplog):
    assert isinstance(load_model(ModelConfig(**TINY, backend="torch")), Decoder)
    assert not caplog.records


@pytest.mark.usefixtures("without")
def test_without_it_torch_computes_and_one_line_says_so(caplog):
    with caplog.at_level(logging.INFO):
        assert isinstance(load_model(ModelConfig(**TINY)), Decoder)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "computed by torch" in record.message
    assert "was not built" in record.message


@pytest.mark.usefixtures("without")
def test_without_it_asking_for_it_is_an_error_that_says_why():
    with pytest.raises(ConfigError, match=r"'native'.*was not built.*'torch'"):
        load_model(ModelConfig(**TINY, backend="native"))


def test_the_fake_model_is_never_native():
    with pytest.raises(ConfigError, match="fake model"):
        load_model(ModelConfig(name="m", source="fake", backend="native"))


def test_a_file_that_is_no_library_is_unavailable(tmp_path):
    path = tmp_path / "_decoder.so"
    path.write_bytes(b"not a library")
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        load_library(path)


@needs_library
def test_a_library_of_another_version_is_unavailable(monkeypatch):
    monkeypatch.setattr(library, "_ABI", 999)
    load_library.cache_clear()
    try:
        assert "not 999" in native_available("float32")
    finally:
        load_library.cache_clear()


@needs_library
def test_what_the_processor_lacks_is_refused_by_name(make):
    with pytest.raises(NativeUnavailable, match="no avx2 for float64"):
        make.decoder((torch.float64, "avx2"))
