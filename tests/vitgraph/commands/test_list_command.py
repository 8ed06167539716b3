"""``vitgraph list``: one row per tower; and the help: commands in groups, with examples."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest

from vitgraph import list_models
from vitgraph.cli import build_parser, main
from vitgraph.commands.arguments import COMMANDS, parse
from weights import FAMILIES
from weights.published import NO_VIDEO, PUBLISHED

Cli = Callable[..., str]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command that must succeed; returns what it prints."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 0
        return capsys.readouterr().out

    return run


def towers(text: str) -> list[str]:
    """Each tower of the list on one line, without the line of its family."""
    joined: list[str] = []
    for line in text.split("\n\n")[0].splitlines()[2:]:
        if line.startswith("   ") and not line[:14].strip():
            joined[-1] += f" {line.strip()}"
        elif line.startswith(" "):
            joined.append(line)
    return joined


def test_each_repo_id_stands_in_one_row(cli: Cli) -> None:
    text, listed = cli("list"), towers(cli("list"))
    words = [word.strip(",") for word in " ".join(listed).split()]
    assert sorted(word for word in words if "/" in word) == list_models()
    assert len(listed) < len(list_models())
    assert all(len(line) <= 100 for line in text.splitlines())


def test_a_row_names_every_repo_id_of_its_tower(cli: Cli) -> None:
    (row,) = towers(cli("list", "*qwen3-omni*"))
    assert row.endswith(", Qwen/Qwen3-Omni-30B-A3B-Instruct, Qwen/Qwen3-VL-30B-A3B-Instruct")
    assert "538.6" in row


def test_each_family_is_headed_by_what_holds_for_it(cli: Cli) -> None:
    text = cli("list")
    for family in FAMILIES.values():
        (heading,) = [
            line for line in text.splitlines() if line.startswith(f"{family.facts.title}: ")
        ]
        assert f"graphs of images: {family.facts.replays['image']}" in heading
        assert (family.facts.video if family.facts.video != NO_VIDEO else "no video") in heading


@pytest.mark.parametrize("pattern", ["qwen3*", "nothing"])
def test_listing_towers_imports_no_torch(pattern: str) -> None:
    code = (
        "import sys; from vitgraph.cli import main; code = main(['list', sys.argv[1]]); "
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, pattern]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_list_says_what_copies_of_timm_leave_out(cli: Cli) -> None:
    said = "Layout qwen3-timm: timm's copy of this tower encodes only images, without DeepStack"
    assert said in cli("list", "timm/qwen3*")
    assert "Layout" not in cli("list", "qwen/*")


@pytest.mark.parametrize("pattern", ["qwen3*", "OPENGVLAB/*", "*-2b*", "Qwen/Qwen2-VL-7B-Instruct"])
def test_the_pattern_is_that_of_list_models(cli: Cli, pattern: str) -> None:
    found = json.loads(cli("list", pattern, "--json"))
    wanted = set(list_models(pattern))
    assert wanted <= {name for tower in found for name in tower["repo_ids"]}
    assert all(wanted.intersection(tower["repo_ids"]) for tower in found)


@pytest.mark.slow
def test_json_tells_sizes_that_the_config_makes(cli: Cli) -> None:
    for tower in json.loads(cli("list", "--json")):
        family = FAMILIES[tower["family"]]
        encoder = family.on_meta(family.config(**tower["config"]))
        assert type(encoder).__name__ == tower["encoder"]
        count = sum(tensor.numel() for tensor in encoder.state_dict().values())
        assert count == tower["parameters"] + tower["projector_parameters"], tower["repo_ids"]


def test_the_list_that_needs_no_torch_is_of_the_known_families() -> None:
    assert list_models() == sorted({model.repo_id for model in PUBLISHED})
    assert {model.family for model in PUBLISHED} == set(FAMILIES)


def test_a_pattern_of_nothing_is_answered_with_near_names(
    cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json.loads(cli("list", "qwen3-vl-2b", "--json")) == []
    assert main(["list", "qwen3-vl-2b"]) == 2
    assert "names like it: Qwen/Qwen3-VL-2B-Instruct" in capsys.readouterr().err


def test_help_shows_every_command_in_a_group_with_its_example() -> None:
    groups = build_parser().format_help().split("\n\n")[3:]
    listed = [line.split()[0] for group in groups for line in group.splitlines()[1::2]]
    assert [group.splitlines()[0] for group in groups] == [
        "features:",
        "checkpoints:",
        "trying and measuring:",
    ]
    assert sorted(listed) == sorted(COMMANDS)
    for _, line in COMMANDS.values():
        assert line in "\n".join(groups)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_commands_help_has_an_example_that_parses(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *arguments = shlex.split(COMMANDS[name].example)
    assert (program, arguments[0]) == ("vitgraph", name)
    parse(build_parser(), arguments)
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert f"example:\n  {COMMANDS[name].example}" in capsys.readouterr().out
