"""How a document is walked through."""

from samestep.launch.check.documents import find_pods, join_path, walk, walk_mappings


def test_walk_visits_everything():
    paths = [path for path, _ in walk({"a": [{"b": 1}, "c"]})]
    assert paths == ["", "a", "a[0]", "a[0].b", "a[1]"]
    assert [path for path, _ in walk_mappings({"a": [{"b": 1}, "c"]})] == ["", "a[0]"]


def test_paths_are_joined():
    assert join_path("", ["spec", "containers", 0, "name"]) == "spec.containers[0].name"
    assert join_path("spec.template", ["spec"]) == "spec.template.spec"
    assert join_path("", []) == ""


def test_pods_are_found_but_not_the_changes_of_one():
    pod = {"spec": {"containers": [{"name": "a"}]}}
    document = {"spec": {"template": pod, "runtimePatches": [{"template": pod}], "other": {}}}
    assert list(find_pods(document)) == [("spec.template", pod)]
    assert list(find_pods(pod)) == [("", pod)]
