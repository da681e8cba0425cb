"""Targets: each way to name a Megatron finds it, and what is imported is that one and no other.

The Megatrons here are a few lines each, the wheels are made on the spot: no network, no torch.
"""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fixtures import target
from fixtures.target import CannotJudge, Target, packages

REPOSITORY = Path(__file__).resolve().parents[2]

PACKAGE_INFO = "MAJOR = {0}\nMINOR = {1}\nPATCH = {2}\nPRE_RELEASE = '{3}'\nraise SystemExit\n"


def write_megatron(root: Path, version: tuple[int, int, int, str] = (0, 99, 1, "rc2")) -> Path:
    """A folder that holds the least that is a Megatron; its files are returned by `root`."""
    core = root / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("from megatron.core import layer\n")
    (core / "layer.py").write_text("FILE = __file__\n")
    (core / "package_info.py").write_text(PACKAGE_INFO.format(*version))
    return root


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit_all(folder: Path) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "state")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with 0.98.0 at tag `team/old` and 0.99.1rc2 at its head."""
    folder = write_megatron(tmp_path / "my@fork", (0, 98, 0, ""))
    git(folder, "init", "--quiet", "--initial-branch", "main")
    commit_all(folder)
    git(folder, "tag", "team/old")
    (folder / "megatron/core/package_info.py").write_text(PACKAGE_INFO.format(0, 99, 1, "rc2"))
    commit_all(folder)
    return folder


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, str], needs: str = ""):  # noqa: ANN201
    """A wheel with `files`, put into `folder`, that depends on `needs`."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that pip can install from."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the environment with the package `present` 1.0.

    Not one of the real packages: what these tests look for would destroy it.
    """
    folder = tmp_path / "site"
    info = folder / "present-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "present.py").touch()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: present\nVersion: 1.0\n")
    (info / "RECORD").write_text("present.py,,\npresent-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def run_python(code: str, **environment: str) -> str:
    """The output of `code` in a fresh process, which can import `fixtures`."""
    paths = [str(REPOSITORY), environment.pop("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def load_and_say(root: Path, expression: str, **environment: str) -> str:
    """What `expression` is in a fresh process that has loaded `root`, or why it cannot."""
    return run_python(
        "from pathlib import Path; import importlib.util, sys; from fixtures import target\n"
        f"try: target.load(Path({str(root)!r}))\n"
        "except target.CannotJudge as error: print('cannot judge:', error)\n"
        f"else: print({expression})",
        **environment,
    )


# --- Finding it -----------------------------------------------------------------------------


def test_a_folder_is_read_without_being_run(tmp_path: Path, cache: Path) -> None:
    root = write_megatron(tmp_path / "plain")
    found = target.resolve(str(root), cache)
    assert found == Target(str(root), root, "folder", "0.99.1rc2", None, False)
    assert found.label == f"{root} (0.99.1rc2)"


def test_a_folder_without_version_is_still_a_target(tmp_path: Path, cache: Path) -> None:
    root = write_megatron(tmp_path / "plain")
    (root / "megatron/core/package_info.py").write_text("not Python at all")
    found = target.resolve(str(root), cache)
    assert found.version is None
    assert "unknown version" in found.label


def test_a_checkout_has_revision_and_dirty_flag(checkout: Path, cache: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "notes.txt").write_text("outside megatron/, so of no account")
    clean = target.resolve(str(checkout), cache)
    assert clean == Target(str(checkout), checkout, "checkout", "0.99.1rc2", head, False)
    assert clean.label == f"{checkout} at {head[:8]} (0.99.1rc2)"

    (checkout / "megatron/core/new.py").touch()
    changed = target.resolve(str(checkout), cache)
    assert changed.dirty
    assert changed.label == f"{checkout} at {head[:8]} (0.99.1rc2, modified)"


def test_git_variables_of_a_hook_do_not_lead_elsewhere(
    checkout: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(REPOSITORY / ".git"))
    assert target.resolve(str(checkout), cache).revision == head


def test_a_megatron_that_a_repository_ignores_is_a_folder(checkout: Path, cache: Path) -> None:
    inner = write_megatron(checkout / "env")
    assert target.resolve(str(inner), cache).kind == "folder"


def test_home_is_told_as_a_tilde(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_megatron(tmp_path / "src")
    assert target.resolve("~/src", cache).label == "~/src (0.99.1rc2)"


def test_a_revision_is_extracted_beside_an_untouched_work_tree(checkout: Path, cache: Path) -> None:
    index = (checkout / ".git/index").read_bytes()
    spec = f"{checkout}@team/old"
    found = target.resolve(spec, cache)
    sha = git(checkout, "rev-parse", "team/old")
    assert found == Target(spec, cache / "revisions" / sha, "revision", "0.98.0", sha, False)
    assert found.label == f"{spec} ({sha[:8]}, 0.98.0)"
    assert [path.name for path in found.root.iterdir()] == ["megatron"]
    assert (checkout / ".git/index").read_bytes() == index
    assert git(checkout, "status", "--porcelain") == ""


@pytest.mark.parametrize("revision", ["HEAD~1", "HEAD@{0}", "main", "team/old"])
def test_each_name_of_a_revision_works(checkout: Path, cache: Path, revision: str) -> None:
    sha = git(checkout, "rev-parse", revision)
    assert target.resolve(f"{checkout}@{revision}", cache).revision == sha


def test_a_checkout_below_its_repository_is_told_from_its_top(checkout: Path, cache: Path) -> None:
    inner = write_megatron(checkout / "vendor", (1, 0, 0, ""))
    commit_all(checkout)
    versions = [target.resolve(f"{each}@HEAD", cache).version for each in (checkout, inner)]
    assert versions == ["0.99.1rc2", "1.0.0"]


def test_a_target_knows_where_in_its_repository_it_is(checkout: Path, cache: Path) -> None:
    inner = write_megatron(checkout / "third party" / "Megatron-LM\n", (1, 0, 0, ""))
    commit_all(checkout)
    for revision in ("", "@HEAD"):
        prefixes = [target.resolve(f"{each}{revision}", cache).prefix for each in (checkout, inner)]
        assert prefixes == ["", "third party/Megatron-LM\n/"]
    assert target.resolve(str(write_megatron(checkout / "new")), cache).prefix == ""


def test_a_link_out_of_an_archive_is_refused(checkout: Path, cache: Path) -> None:
    (checkout / "megatron/out").symlink_to("/etc")
    commit_all(checkout)
    with pytest.raises(CannotJudge, match=r"cannot be extracted: 'megatron/out' is a link"):
        target.resolve(f"{checkout}@HEAD", cache)
    assert not list((cache / "revisions").glob("[!.]*"))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "the target's name is empty"),
        ("somewhere", "'somewhere' is neither a folder here nor a version"),
        ("0.16.x", "'0.16.x' is neither a folder here nor a version"),
        ("./somewhere", "no such folder: {here}/somewhere"),
        ("no/where@main", "no such folder: {here}/no/where"),
        ("plain", "plain is not a Megatron: it has no megatron/core/__init__.py"),
        ("file", "file is not a folder"),
        ("file@main", "file is not a folder"),
        ("plain@main", "plain is not a git checkout: fatal: not a git repository"),
        ("my@fork@nowhere", "unknown revision 'nowhere' in {here}/my@fork"),
        ("my@fork@", "unknown revision '' in"),
        ("my@fork@--output=stolen", "unknown revision '--output=stolen' in"),
        ("my@fork@empty", "cannot be read: fatal: pathspec 'megatron' did not match any files"),
        ("my@fork/megatron", "is inside a Megatron: give {here}/my@fork instead"),
        ("my@fork/megatron/core", "is inside a Megatron: give {here}/my@fork instead"),
    ],
)
def test_what_is_no_target_is_told_in_one_line(
    checkout: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, spec: str, said: str
) -> None:
    here = checkout.parent
    monkeypatch.chdir(here)
    # git looks for a repository in the folders above.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(here))
    (here / "plain").mkdir()
    (here / "file").touch()
    empty = git(checkout, "commit-tree", "-m", "empty", git(checkout, "mktree"))
    git(checkout, "tag", "empty", empty)
    with pytest.raises(CannotJudge) as error:
        target.resolve(spec, cache)
    assert said.format(here=here) in str(error.value)
    assert "\n" not in str(error.value)
    assert not (here / "stolen").exists()


def test_anchored_means_the_same_from_everywhere(checkout: Path) -> None:
    here = checkout.parent
    specs = {
        "my@fork": f"{here}/my@fork",
        "./my@fork/../my@fork@team/old": f"{here}/my@fork@team/old",
        "0.16.1": "0.16.1",
        "v0.16.1rc1": "0.16.1rc1",
    }
    assert {spec: target.anchored(spec, here) for spec in specs} == specs
    with pytest.raises(CannotJudge, match="no such folder"):
        target.anchored("gone/../fork", here)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("PRECISION_GATE_CACHE", raising=False)
    assert target.default_cache() == Path("/home/me/.cache/precision-gate")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert target.default_cache() == Path("/fast/precision-gate")
    monkeypatch.setenv("PRECISION_GATE_CACHE", "~/own")
    assert target.default_cache() == Path("/home/me/own")


# --- Releases and packages ------------------------------------------------------------------


def test_a_release_is_fetched_once(wheels: Path, cache: Path) -> None:
    files = {"megatron/core/__init__.py": "", "megatron/core/new.py": ""}
    write_wheel(wheels, "megatron_core", "0.99.0", files, needs="nothing-that-exists")
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(lambda _: target.resolve("v0.99.0", cache), range(2)))
    root = cache / "releases" / "0.99.0"
    assert found == [Target("v0.99.0", root, "release", "0.99.0", None, False)] * 2
    assert found[0].label == "megatron-core 0.99.0"
    assert (root / "megatron/core/new.py").is_file()

    (wheels / "megatron_core-0.99.0-py3-none-any.whl").unlink()
    assert target.resolve("0.99.0", cache).root == root
    assert [path.name for path in root.parent.glob("[!.]*")] == ["0.99.0"]


def test_an_unknown_release_names_the_known_ones(wheels: Path, cache: Path) -> None:
    write_wheel(wheels, "megatron_core", "0.98.0", {})
    write_wheel(wheels, "megatron_core", "0.99.0", {})
    with pytest.raises(CannotJudge, match=r"no megatron-core 0\.7\.7: .* 0\.98\.0, 0\.99\.0$"):
        target.resolve("0.7.7", cache)
    assert not (cache / "releases" / "0.7.7").exists()


def test_without_an_index_that_is_the_reason(wheels: Path, cache: Path) -> None:
    assert not list(wheels.iterdir())
    with pytest.raises(CannotJudge, match=r"0\.7\.7 cannot be fetched: .*no package index"):
        target.resolve("0.7.7", cache)


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(CannotJudge, match=r"cannot be written: .*PRECISION_GATE_CACHE"):
        target.resolve("0.7.7", tmp_path / "cache")


def test_the_installed_release_is_the_default(tmp_path: Path, cache: Path) -> None:
    site = write_megatron(tmp_path / "site")
    info = site / "megatron_core-0.99.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.99.1\n")
    code = (
        "from pathlib import Path; from fixtures import target\n"
        f"found = target.resolve(None, Path({str(cache)!r}))\n"
        "print(found.root, found.kind, found.label)"
    )
    said = run_python(code, PYTHONPATH=str(site))
    assert said == f"{site} release megatron-core 0.99.1"


def test_with_installs_what_is_missing_and_nothing_else(
    wheels: Path, present: Path, cache: Path, tmp_path: Path
) -> None:
    write_wheel(wheels, "addon", "1.0", {"addon.py": "import present, further"}, needs="further")
    write_wheel(wheels, "further", "1.0", {"further.py": ""}, needs="present")
    write_wheel(wheels, "present", "999.0", {"present.py": "raise SystemExit('replaced')"})
    site = target.overlay(["addon"], cache)
    assert site is not None
    assert {path.stem for path in site.glob("*.py")} == {"addon", "further"}
    assert target.overlay(["addon"], cache) == site

    root = write_megatron(tmp_path / "plain")
    (root / "megatron/core/layer.py").write_text("import addon\n")
    assert "add --with addon" in load_and_say(root, "'loaded'")
    code = (
        "from pathlib import Path; from fixtures import target\n"
        f"target.load(Path({str(root)!r}), [Path({str(site)!r})]); print('loaded')"
    )
    assert run_python(code, PYTHONPATH=str(present)) == "loaded"


def test_with_leaves_the_environment_as_it_is(wheels: Path, present: Path, cache: Path) -> None:
    write_wheel(wheels, "present", "999.0", {"present.py": ""})
    with pytest.raises(CannotJudge, match=r"--with present==999\.0 cannot .* stay at their"):
        target.overlay(["present==999.0"], cache)
    assert (present / "present.py").is_file()


@pytest.mark.usefixtures("wheels", "present")
def test_with_what_is_there_needs_no_folder(cache: Path) -> None:
    assert target.overlay([], cache) is None
    assert target.overlay(["present"], cache) is None


def test_with_a_file_that_changed_is_installed_anew(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = []
    monkeypatch.setattr(packages, "_install_beside", lambda *arguments: installed.append(arguments))
    plugin = tmp_path / "plugin" / "code.py"
    plugin.parent.mkdir()
    for times in (1, 1, 2):
        plugin.touch()
        os.utime(plugin, (times, times))
        os.utime(plugin.parent, (0, 0))
        target.overlay([str(plugin.parent)], cache)
    assert len(installed) == 2


@pytest.mark.parametrize("requirement", ["", "--index-url=x", "no-such-package-here"])
def test_with_bad_input_is_told_in_one_line(wheels: Path, cache: Path, requirement: str) -> None:
    assert wheels.is_dir()
    with pytest.raises(CannotJudge, match=r"^--with .*(is not a requirement|cannot be ins).*$"):
        target.overlay([requirement], cache)


# --- Importing it ---------------------------------------------------------------------------


@pytest.mark.parametrize("init", [None, "", "import pkgutil\n__path__ = pkgutil.extend_path"])
def test_no_other_megatron_leaks_in(tmp_path: Path, init: str | None) -> None:
    root = write_megatron(tmp_path / "judged")
    installed = write_megatron(tmp_path / "installed")
    (installed / "megatron/training.py").touch()
    if init is not None:
        call = "(__path__, __name__)\n" if init else ""
        for each in (root, installed):
            (each / "megatron/__init__.py").write_text(init + call)
    said = load_and_say(
        root,
        "sys.modules['megatron.core.layer'].FILE,"
        "target.foreign_modules(Path.cwd()),"
        f"target.foreign_modules(Path({str(root)!r})),"
        "importlib.util.find_spec('megatron.training')",
        PYTHONPATH=str(installed),
    )
    ours = ["megatron", "megatron.core", "megatron.core.layer"]
    assert said == f"{root}/megatron/core/layer.py {ours} [] None"


def test_a_package_found_through_a_link_is_not_foreign(tmp_path: Path) -> None:
    write_megatron(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    code = "target.foreign_modules(Path('{}'))".format(tmp_path / "real")
    assert load_and_say(tmp_path / "link", code) == "[]"


def test_one_process_judges_one_megatron(tmp_path: Path) -> None:
    roots = [write_megatron(tmp_path / name) for name in ("first", "second")]
    said = run_python(
        "from pathlib import Path; from fixtures import target\n"
        f"for root in {[str(root) for root in (roots[0], *roots)]}:\n"
        "    try: target.load(Path(root)); print('loaded')\n"
        "    except target.CannotJudge as error: print(error)"
    )
    assert said.splitlines()[:2] == ["loaded", "loaded"]
    assert said.splitlines()[2].startswith(f"megatron is already imported from {roots[0]}")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import absent.part",
            "megatron/core/layer.py:2 imports 'absent', which is not installed: add --with absent "
            "(or the package that brings it)",
        ),
        (
            "import json.absent",
            "megatron/core/layer.py:2 cannot be imported: ModuleNotFoundError: "
            "No module named 'json.absent'",
        ),
        (
            "import megatron.training",
            "megatron/core/layer.py:2 cannot be imported: ModuleNotFoundError: "
            "No module named 'megatron.training'",
        ),
        (
            "import json; json.loads('{')",
            "megatron/core/layer.py:2 cannot be imported: JSONDecodeError: Expecting property",
        ),
        ("(", "megatron/core/layer.py:2 cannot be imported: SyntaxError: '(' was never closed"),
        (
            "raise SystemExit('no GPU')",
            "megatron/core/layer.py:2 cannot be imported: SystemExit: no GPU",
        ),
        (
            "raise ValueError('first\\nsecond')",
            "megatron/core/layer.py:2 cannot be imported: ValueError: first",
        ),
    ],
)
def test_what_cannot_be_imported_names_its_line(tmp_path: Path, source: str, said: str) -> None:
    root = write_megatron(tmp_path / "broken")
    (root / "megatron/core/layer.py").write_text(f"# a line before\n{source}\n")
    output = load_and_say(root, "'loaded'")
    assert output.startswith(f"cannot judge: {said}")
    assert "\n" not in output


def test_targets_are_read_without_torch_or_megatron() -> None:
    names = run_python(
        "import json, sys; from fixtures import target; print(json.dumps(list(sys.modules)))"
    )
    assert not {"torch", "numpy", "megatron"} & set(json.loads(names))
