"""Lets Debian's own Bazel (packages bazel-bootstrap, bazel-rules-java, bazel-rules-proto, bazel-platforms) work offline.

Bazel 4 appends repositories to every WORKSPACE that it would download. A repository declared here first takes the place of one of
the same name there. Debian's build is told by its empty version; every other Bazel downloads what it wants.
"""

def _files_impl(repository_ctx):
    for path, content in repository_ctx.attr.files.items():
        repository_ctx.file(path, content)

_files = repository_rule(
    implementation = _files_impl,
    attrs = {"files": attr.string_dict(doc = "content of each file of the repository")},
)

def debian_bazel_repositories():
    if native.bazel_version:
        return
    for name in ["rules_java", "rules_proto"]:
        native.local_repository(name = name, path = "/usr/share/bazel/rules/" + name[len("rules_"):])
    native.local_repository(name = "platforms", path = "/usr/share/bazel/platforms")

    # Debian's package bazel-rules-cc is too new for this Bazel, whose native rules do.
    rules = ["cc_binary", "cc_import", "cc_library", "cc_test", "cc_toolchain", "cc_toolchain_suite"]
    _files(name = "rules_cc", files = {
        "cc/BUILD": "",
        "cc/defs.bzl": "".join(["{0} = native.{0}\n".format(rule) for rule in rules]),
    })

    # Every test depends on this, but only `bazel coverage` would use it.
    _files(name = "remote_coverage_tools", files = {
        "BUILD": 'filegroup(name = "coverage_report_generator", visibility = ["//visibility:public"])\n',
    })
