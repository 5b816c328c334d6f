"""pytest_test: one file of pytest tests as a Bazel test."""

load("@local_python//:python.bzl", "PYTHON")

def pytest_test(name, src, data = [], **kwargs):
    """Runs `pytest src` where the runfiles' root is on sys.path.

    Args:
      name: of the target.
      src: the file.
      data: what it imports and reads.
      **kwargs: of sh_test: timeout, tags, ...
    """
    native.sh_test(
        name = name,
        srcs = ["//tools:pytest.sh"],
        args = ["'%s'" % PYTHON, "$(rootpath %s)" % src],
        data = [src] + data,
        **kwargs
    )
