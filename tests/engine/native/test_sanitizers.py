"""The library under AddressSanitizer and UndefinedBehaviorSanitizer, driven from C++.

Shapes that fit no vector, a pool full of NaN, several threads, arguments out of range.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "engine/native/src"
NAMES = ("api", "kernels_portable", "kernels_avx2", "kernels_avx512")


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_variant_runs_clean(tmp_path, sanitizer):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = ["-std=c++20", "-O1", "-g", "-pthread", "-ffp-contract=off", "-w"]
    flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{SOURCE}"]
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}")
    program = tmp_path / "sanitized"
    if subprocess.run([compiler, *flags, probe, "-o", program], capture_output=True).returncode:
        pytest.skip(f"this compiler has no {sanitizer} sanitizer")
    sources = [SOURCE / f"{name}.cpp" for name in NAMES]
    sources.append(Path(__file__).with_name("sanitized.cpp"))
    objects = [tmp_path / f"{source.stem}.o" for source in sources]
    compiling = [
        subprocess.Popen([compiler, *flags, "-c", source, "-o", to])
        for source, to in zip(sources, objects, strict=True)
    ]
    assert [process.wait() for process in compiling] == [0] * len(sources)
    subprocess.run([compiler, *flags, *objects, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 90
