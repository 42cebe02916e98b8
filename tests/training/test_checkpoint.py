from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evojax.errors import UnavailableError
from evojax.training import checkpoint


def state_of(step):
    return {
        "params": {"w": jnp.arange(64.0).reshape(8, 8) + step, "b": jnp.full((8,), 0.5)},
        "step": jnp.int32(step),
    }


def abstract():
    return jax.eval_shape(lambda: state_of(0))


def save(directory, step, **kwargs):
    return checkpoint.save(directory, step, state_of(step), {"cursor": [step, 2]}, **kwargs)


def files_of(path):
    return sorted(p for p in Path(path).rglob("*") if p.is_file())


def biggest(path):
    return max(files_of(path), key=lambda p: p.stat().st_size)


def test_round_trip_of_arrays_and_meta(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    assert checkpoint.restore(tmp_path / "none", abstract()) is None
    save(tmp_path, 3)
    found = checkpoint.restore(tmp_path, abstract())
    assert found is not None and (found.step, found.warnings) == (3, ())
    assert found.meta == {"cursor": [3, 2]}
    jax.tree.map(np.testing.assert_array_equal, found.state, state_of(3))
    assert found.state["step"].dtype == jnp.int32


def test_keeps_the_newest_ones_and_replaces_a_step(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    checkpoint.save(tmp_path, 3, state_of(30), {}, keep=2)
    found = checkpoint.restore(tmp_path, abstract(), step=3)
    assert found is not None and int(found.state["step"]) == 30
    assert len(list(tmp_path.iterdir())) == 2


def test_case_K04_damaged_newest_is_passed_over_and_kept(tmp_path):
    paths = [save(tmp_path, step, keep=3) for step in (1, 2, 3)]
    victim = biggest(paths[2] / "arrays")
    victim.write_bytes(victim.read_bytes()[:-7])
    assert checkpoint.latest(tmp_path) == 2
    found = checkpoint.restore(tmp_path, abstract())
    assert found is not None and found.step == 2 and int(found.state["step"]) == 2
    assert len(found.warnings) == 1 and "step_00000003" in found.warnings[0]
    assert victim.exists()
    save(tmp_path, 3, keep=3)
    assert checkpoint.latest(tmp_path) == 3
    assert any(p.name.startswith("damaged-step_00000003") for p in tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["missing file", "no marker", "cut meta", "flipped byte"])
def test_case_K04_every_part_is_covered_by_the_marker(tmp_path, fault):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    victim = biggest(path / "arrays")
    if fault == "missing file":
        victim.unlink()
    elif fault == "no marker":
        (path / "COMPLETE.json").unlink()
    elif fault == "cut meta":
        (path / "meta.json").write_text('{"cursor": [2')
    else:
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(bytes(data))
    found = checkpoint.restore(tmp_path, abstract())
    assert found is not None and found.step == 1 and len(found.warnings) == 1


def test_case_K04_nothing_whole_is_an_error_that_names_the_place(tmp_path):
    (save(tmp_path, 1) / "COMPLETE.json").write_text("{")
    with pytest.raises(UnavailableError, match=str(tmp_path)):
        checkpoint.restore(tmp_path, abstract())
    with pytest.raises(UnavailableError, match="step 7"):
        checkpoint.restore(tmp_path, abstract(), step=7)


def test_case_K04_full_disk_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1, keep=1)

    def full(path, state):
        (path / "half").mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_arrays", full)
        with pytest.raises(UnavailableError, match="No space left") as caught:
            save(tmp_path, 2, keep=1)
    assert str(tmp_path) in str(caught.value) and caught.value.exit_code == 3
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert checkpoint.latest(tmp_path) == 1


def test_case_K04_really_full_disk(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        # Without mount rights a path below a file is a disk that refuses to be written.
        blocker = tmp_path / "file"
        blocker.write_text("")
        with pytest.raises(UnavailableError, match="could not be written"):
            save(blocker / "sub", 1)
        return
    try:
        save(mount, 1)
        large = {"w": jnp.zeros((1 << 20,)) + jnp.arange(1 << 20)}
        with pytest.raises(UnavailableError, match="could not be written"):
            checkpoint.save(mount, 2, large, {})
        found = checkpoint.restore(mount, abstract())
        assert found is not None and found.step == 1
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_shapes_that_do_not_fit_are_an_error(tmp_path):
    save(tmp_path, 1)
    wrong = {**abstract(), "extra": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(UnavailableError, match="cannot be read"):
        checkpoint.restore(tmp_path, wrong)


SAVER = """
    import os, sys
    import jax
    jax.config.update("jax_num_cpu_devices", 4)
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    from evojax.training import checkpoint

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("data")))
    checkpoint.save(sys.argv[1], 1, {"w": w}, {"devices": 4})
    checkpoint._write_marker = lambda *args: os._exit(9)
    checkpoint.save(sys.argv[1], 2, {"w": w}, {})
"""
READER = """
    import json, sys
    import jax
    jax.config.update("jax_num_cpu_devices", 8)
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    from evojax.training import checkpoint

    shapes = []
    for count in (1, 2, 8):
        mesh = jax.sharding.Mesh(jax.devices()[:count], ("data",))
        target = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
        found = checkpoint.restore(sys.argv[1], {"w": target})
        assert (found.state["w"] == jnp.arange(64.0).reshape(8, 8)).all()
        shapes.append(found.state["w"].addressable_shards[0].data.shape[0])
    print(json.dumps([shapes, found.step, found.meta]))
"""


def run(source, directory):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), str(directory)],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_case_K01_K02_killed_save_is_ignored_and_any_device_count_restores(tmp_path):
    killed = run(SAVER, tmp_path)
    assert killed.returncode == 9, killed.stderr
    assert len(list(tmp_path.iterdir())) == 2, "step 1 and the temporary directory of step 2"
    assert checkpoint.latest(tmp_path) == 1
    read = run(READER, tmp_path)
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout) == [[8, 4, 1], 1, {"devices": 4}]
    alone = checkpoint.restore(tmp_path, {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)})
    assert alone is not None
    np.testing.assert_array_equal(alone.state["w"], np.arange(64.0).reshape(8, 8))
    save(tmp_path, 5, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]
