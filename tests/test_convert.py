"""The command, every pair of formats, and that no file is ever half there."""

import json
import os
import signal
import subprocess
import sys

import h5py
import keras
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import tensorflow as tf
import tf_keras

import helpers
from helpers import bits
from xla_lamb import __main__ as command
from xla_lamb import checkpoints
from xla_lamb.checkpoints import Checkpoint, match

SHAPES = {"dense/kernel": (3, 4), "dense/bias": (4,), "head/kernel": (4, 2)}
# Each with its name of the file, and its format.
KINDS = {
    "orbax": ("run", "optax"),
    "keras": ("run.keras", "keras"),
    "weights": ("run.weights.h5", "keras"),
    "tensorflow": ("run.ckpt", "tf_addons"),
    "h5": ("run.h5", "tf_addons"),
    "safetensors": ("run.safetensors", "apex"),
}


def checkpoint():
    """Bits that a sloppy conversion would change."""
    first, second, params = (dict(zip(SHAPES, helpers.tree(SHAPES.values(), seed))) for seed in (1, 2, 3))
    first["dense/kernel"][0, :4] = [np.nan, -0.0, 1e-45, 3e38]
    second["dense/bias"][:2] = [np.inf, 0.1]
    return Checkpoint(2**31 - 1, first, second, params, {"learning_rate": 0.25})


def layers(keras):
    return [keras.layers.Dense(4, name="dense"), keras.layers.Dense(2, use_bias=False, name="head")]


@pytest.fixture(scope="module")
def like(tmp_path_factory):
    """A checkpoint of a target for each kind: fresh in Keras 3, after one step in Keras 2."""
    folder = tmp_path_factory.mktemp("like")
    model = keras.Sequential([keras.Input((3,)), *layers(keras)])
    model.compile(keras.optimizers.Lamb(0.5), loss="mse")
    model.save(folder / "fresh.keras")
    old = tf_keras.Sequential([tf_keras.Input((3,)), *layers(tf_keras)])
    old.compile(tf_keras.optimizers.legacy.Adam(0.5), loss="mse")
    old.optimizer.apply_gradients((tf.ones_like(v), v) for v in old.trainable_variables)
    tf.train.Checkpoint(model=old, optimizer=old.optimizer).write(str(folder / "old"))
    old.save(folder / "old.h5")
    return {
        "orbax": None,
        "keras": folder / "fresh.keras",
        "weights": folder / "fresh.keras",
        "tensorflow": folder / "old",
        "h5": folder / "old.h5",
        "safetensors": None,
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory, like):
    """One checkpoint in every format."""
    folder = tmp_path_factory.mktemp("sources")
    for kind, (name, format) in KINDS.items():
        checkpoints.write(checkpoint(), folder / name, format, like=like[kind], by_position=kind == "safetensors")
    return folder


def read(folder, kind, like):
    name, format = KINDS[kind]
    return checkpoints.read(folder / name, format, like=like["keras"] if kind == "weights" else None)


def listing(folder):
    """Every file below a folder, with what it holds."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_every_pair_of_formats_keeps_every_bit(tmp_path, like, sources, source, target):
    (source_name, source_format), (target_name, target_format) = KINDS[source], KINDS[target]
    report = checkpoints.convert(
        sources / source_name,
        tmp_path / target_name,
        source_format,
        target_format,
        like=like[target],
        source_like=like["keras"] if source == "weights" else None,
        by_position=target == "safetensors",
    )
    back = match(read(tmp_path, target, like), SHAPES)[0]
    expected = checkpoint()
    assert back.step == report.step == expected.step
    for ours, theirs in ((back.first, expected.first), (back.second, expected.second), (back.params, expected.params)):
        assert {name: bits(x) for name, x in ours.items()} == {name: bits(x) for name, x in theirs.items()}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    # A file of optax has no learning rate; all others have, and keep it.
    if "orbax" not in (source, target):
        assert back.options["learning_rate"] == 0.25
    elif source != target:
        assert "learning_rate" in "\n".join(report.lost)


def test_the_test_sees_a_changed_bit(tmp_path, sources):
    arrays = safetensors.numpy.load_file(sources / "run.safetensors")
    arrays["state.1.exp_avg"][0] = np.nextafter(arrays["state.1.exp_avg"][0], np.float32(9))
    with safetensors.safe_open(sources / "run.safetensors", "np") as file:
        safetensors.numpy.save_file(arrays, tmp_path / "run.safetensors", file.metadata())
    changed = checkpoints.read(tmp_path / "run.safetensors", "apex")
    assert bits(list(changed.first.values())) != bits(list(checkpoint().first.values()))
    assert bits(list(changed.second.values())) == bits(list(checkpoint().second.values()))


def test_a_step_that_the_target_cannot_count(tmp_path):
    late = checkpoint()
    late.step = 2**31
    with pytest.raises(checkpoints.CheckpointError, match="2147483648 steps do not fit the target's counter, which is int32"):
        checkpoints.write(late, tmp_path / "run", "optax")
    assert list(tmp_path.iterdir()) == []


# Whole or not at all -----------------------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def break_in_the_middle(monkeypatch, kind):
    """Lets the library that writes this kind write, and fail then, so that there is something half done."""

    def after(function):
        def run(*args, **kwargs):
            function(*args, **kwargs)
            raise Broken("the disk is gone")

        return run

    owner, name = {
        "orbax": (ocp.StandardCheckpointer, "save"),
        "keras": (keras.Model, "save"),
        "weights": (keras.Model, "save_weights"),
        "tensorflow": (tf.raw_ops, "SaveV2"),
        "h5": (h5py.AttributeManager, "__setitem__"),
        "safetensors": (safetensors.numpy, "save_file"),
    }[kind]
    monkeypatch.setattr(owner, name, after(getattr(owner, name)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_the_middle_leaves_nothing_or_the_old_one(tmp_path, monkeypatch, like, kind):
    name, format = KINDS[kind]
    write = lambda **options: checkpoints.write(
        checkpoint(), tmp_path / name, format, like=like[kind], by_position=kind == "safetensors", **options
    )
    with monkeypatch.context() as context:
        break_in_the_middle(context, kind)
        with pytest.raises(checkpoints.CheckpointError, match="the disk is gone"):
            write()
    assert list(tmp_path.iterdir()) == []
    write()
    old = listing(tmp_path)
    with pytest.raises(FileExistsError, match="--force"):
        write()
    with monkeypatch.context() as context:
        break_in_the_middle(context, kind)
        with pytest.raises(checkpoints.CheckpointError):
            write(force=True)
    assert listing(tmp_path) == old
    # The last moment: what was written is being moved into place.
    fail_to_move(monkeypatch, times=1)
    with pytest.raises(OSError, match="the disk is gone"):
        write(force=True)
    assert listing(tmp_path) == old
    write(force=True)
    assert match(read(tmp_path, kind, like), SHAPES)[0].step == checkpoint().step
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def fail_to_move(monkeypatch, times, after=0):
    """Lets `times` moves into place fail, after some that did not; what happens beside it, in the hidden directory, goes on."""
    rename, replace, left, good = os.rename, os.replace, [times], [after]

    def failing(move):
        def moved(source, target):
            if left[0] > 0 and ".partial-" not in str(target):
                if not good[0]:
                    left[0] -= 1
                    raise OSError("the disk is gone")
                good[0] -= 1
            move(source, target)

        return moved

    monkeypatch.setattr(os, "rename", failing(rename))
    monkeypatch.setattr(os, "replace", failing(replace))


def test_of_several_files_none_is_left(tmp_path, monkeypatch, like):
    fail_to_move(monkeypatch, times=1, after=1)  # the data is there, the index is not
    with pytest.raises(OSError, match="the disk is gone"):
        checkpoints.write(checkpoint(), tmp_path / "run", "tf_addons", like=like["tensorflow"])
    assert list(tmp_path.iterdir()) == []


def test_if_even_moving_back_fails_the_old_one_is_kept_aside(tmp_path, monkeypatch):
    checkpoints.write(checkpoint(), tmp_path / "run", "optax")
    old = listing(tmp_path / "run")
    fail_to_move(monkeypatch, times=2)
    with pytest.raises(OSError, match="the disk is gone"):
        checkpoints.write(checkpoint(), tmp_path / "run", "optax", force=True)
    (aside,) = tmp_path.glob(".run.partial-*/old/run")
    assert listing(aside) == old and not (tmp_path / "run").exists()


KILLED = """
import sys, time
import numpy as np
from xla_lamb import checkpoints
from xla_lamb.checkpoints import files
x = {"w": np.full((3, 2), 7.0, np.float32)}
swap = files._sync
def slowly(new):
    swap(new)
    print("written", flush=True)
    time.sleep(60)
files._sync = slowly
checkpoints.write(checkpoints.Checkpoint(7, x, x), sys.argv[1], "apex", by_position=True, force=True)
"""


def test_a_killed_conversion_leaves_the_old_file(tmp_path):
    path = tmp_path / "run.safetensors"
    x = {"w": np.ones((3, 2), np.float32)}
    checkpoints.write(Checkpoint(1, x, x), path, "apex", by_position=True)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, path], cwd=helpers.ROOT, stdout=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=str(helpers.ROOT))
    )
    assert process.stdout.readline() == b"written\n"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    assert checkpoints.read(path, "apex").step == 1
    checkpoints.write(Checkpoint(2, x, x), path, "apex", by_position=True, force=True)
    assert checkpoints.read(path, "apex").step == 2


def test_more_files_of_an_old_checkpoint_are_gone_with_it(tmp_path, like):
    for name in ("run.ckpt.index", "run.ckpt.data-00000-of-00002", "run.ckpt.data-00001-of-00002", "run.ckpt2.index"):
        (tmp_path / name).write_text(name)
    checkpoints.write(checkpoint(), tmp_path / "run.ckpt", "tf_addons", like=like["tensorflow"], force=True)
    assert sorted(listing(tmp_path)) == ["run.ckpt.data-00000-of-00001", "run.ckpt.index", "run.ckpt2.index"]


# The command -------------------------------------------------------------------------------------------------------------------


def run(*arguments):
    return command.main(["convert", *map(str, arguments)])


def test_the_command_converts_and_reports(tmp_path, sources, like, capsys):
    assert run("--from", "tf_addons", "--to", "keras", "--like", like["keras"], sources / "run.ckpt", tmp_path / "run.keras") == 0
    out = capsys.readouterr().out
    assert "step 2147483647, 3 tensors matched by name" in out and "not carried over:" in out and str(tmp_path / "run.keras") in out
    assert int(keras.saving.load_model(tmp_path / "run.keras").optimizer.iterations) == 2**31 - 1

    names = {
        "layer.weight": {"from": "dense/kernel", "transpose": True},
        "layer.bias": "dense/bias",
        "last.weight": {"from": "head/kernel", "transpose": True},
    }
    (tmp_path / "names.json").write_text(json.dumps(names))
    assert (
        run("--from", "keras", "--to", "apex", "--names", tmp_path / "names.json", tmp_path / "run.keras", tmp_path / "run.safetensors")
        == 0
    )
    assert "layer.weight <- dense/kernel" in capsys.readouterr().out
    with safetensors.safe_open(tmp_path / "run.safetensors", "np") as file:
        assert json.loads(file.metadata()["names"]) == list(names)
        assert bits(file.get_tensor("state.0.exp_avg")) == bits(np.ascontiguousarray(checkpoint().first["dense/kernel"].T))

    assert run("--from", "keras", "--to", "optax", "--source-like", like["keras"], sources / "run.weights.h5", tmp_path / "run") == 0
    assert run("--from", "optax", "--to", "apex", "--by-position", "--force", tmp_path / "run", tmp_path / "run.safetensors") == 0
    # The target may be what it is like.
    place = tmp_path / "run.keras"
    assert run("--from", "apex", "--to", "keras", "--like", place, "--force", sources / "run.safetensors", place) == 0
    assert int(keras.saving.load_model(place).optimizer.iterations) == 2**31 - 1
    capsys.readouterr()
    assert run("--from", "optax", "--to", "optax", sources / "run", tmp_path / "run") == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--from optax --to apex {sources}/run {new}.safetensors", "the tensors of the target have no names"),
        ("--from optax --to apex --by-position {sources}/run {new}.npz", "is a .safetensors, .pt or .pth file"),
        ("--from optax --to keras {sources}/run {new}.keras", "needs --like"),
        ("--from keras --to optax {sources}/nothing.keras {new}", "there is no "),
        ("--from keras --to optax {sources}/run.h5 {new}", "holds no optimizer"),
        ("--from apex --to optax {sources}/run {new}", "is a .safetensors, .pt or .pth file, and run is none"),
        ("--from tf_addons --to optax {sources}/run.keras {new}", "no prefix of a TensorFlow checkpoint"),
        ("--from optax --to optax {sources}/run.ckpt {new}", "there is no "),
        ("--from keras --to optax {sources}/run {new}", "cannot read "),
        ("--from optax --to optax {sources}/run {new}/deeper/run", "there is no directory "),
        ("--from optax --to optax --like {sources}/nothing {sources}/run {new}", "there is no "),
        ("--from optax --to optax --source-like {like} {sources}/run {new}", "only a .weights.h5 file takes names"),
        ("--from optax --to optax --names {sources}/nothing {sources}/run {new}", "No such file"),
        ("--from optax --to optax --names {sources}/run.h5 {sources}/run {new}", "is not JSON"),
    ],
)
def test_errors_are_one_sentence(tmp_path, sources, like, capsys, arguments, message):
    code = run(*arguments.format(sources=sources, like=like["keras"], new=tmp_path / "new").split())
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and message in captured.err
    assert captured.err.startswith("xla_lamb convert: ") and captured.err.count("\n") == 1 and "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_as_a_process(tmp_path, sources):
    """Without a framework: a .safetensors file into another."""
    call = [
        sys.executable,
        "-m",
        "xla_lamb",
        "convert",
        "--from",
        "apex",
        "--to",
        "apex",
        sources / "run.safetensors",
        tmp_path / "new.safetensors",
    ]
    done = subprocess.run(call, cwd=helpers.ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1 and "--by-position" in done.stderr
    done = subprocess.run([*call, "--by-position"], cwd=helpers.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and "dense/kernel <- dense/kernel" in done.stdout
