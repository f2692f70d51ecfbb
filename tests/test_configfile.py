"""Config files and command lines: formats, sections, settings, and the one right message for each mistake."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patchguard.arguments import normalise
from patchguard.configfile import Config, load
from patchguard.errors import ArgumentsError

pytest.importorskip("yaml", reason="YAML needs PyYAML, of the hosts extra")
needs_omegaconf = pytest.mark.skipif(importlib.util.find_spec("omegaconf") is None, reason="OmegaConf is not installed")

ROOT = Path(__file__).resolve().parent.parent

#: The shape of verl's composed config: several engine sections, one made of interpolations, values still missing.
VERL = """\
actor_rollout_ref:
  actor:
    strategy: megatron
    optim:
      lr: 1e-6
    megatron:
      _target_: verl.workers.config.McoreEngineConfig
      tensor_model_parallel_size: 2
      context_parallel_size: 1
      seed: ${oc.select:data.seed,42}
      override_transformer_config:
        recompute_granularity: null
        recompute_modules: [core_attn]
        attention_backend: flash
        use_flash_attn: true
      use_mbridge: true
  ref:
    megatron:
      context_parallel_size: ${oc.select:actor_rollout_ref.actor.megatron.context_parallel_size,1}
      override_transformer_config: ${oc.select:actor_rollout_ref.actor.megatron.override_transformer_config,{}}
  rollout:
    name: ???
critic:
  megatron:
    context_parallel_size: 1
    override_transformer_config:
      attention_backend: flash
"""
ACTOR = "actor_rollout_ref.actor.megatron"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def made(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return made


def message(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ArgumentsError) as caught:
        load(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


# ---- formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "use_flash_attn: true\ncontext_parallel_size: 2\nalgo: [a, b]\n"),
        ("c.YML", "{use_flash_attn: true, context_parallel_size: 2, algo: [a, b]}"),
        ("c.toml", 'use_flash_attn = true\ncontext_parallel_size = 2\nalgo = ["a", "b"]\n'),
        ("c.json", '{"use_flash_attn": true, "context_parallel_size": 2, "algo": ["a", "b"]}'),
    ],
)
def test_each_format_gives_the_same_arguments(write: Any, name: str, text: str) -> None:
    found = load(write(name, text))
    assert found.arguments == {"use_flash_attn": True, "context_parallel_size": 2, "algo": ["a", "b"]}
    assert found.command_line == ()
    assert found.section == ""
    assert found.source.endswith(name)


@needs_omegaconf
def test_what_is_loaded_is_plain_and_travels_and_nothing_is_imported_for_it(write: Any) -> None:
    path = write("c.yaml", VERL)
    found = load(path)
    assert json.loads(json.dumps(found.arguments)) == found.arguments
    code = (
        "import sys\nfrom patchguard.configfile import load\nload(sys.argv[1])\n"
        "print([n for n in ('torch', 'megatron', 'mindspeed') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.stdout == "[]\n", done.stderr


@needs_omegaconf
def test_numbers_are_read_as_hydra_reads_them(write: Any) -> None:
    assert load(write("c.yaml", "loss_scale: 1e-5\n")).arguments == {"loss_scale": 1e-5}


# ---- sections ------------------------------------------------------------------------------------


@needs_omegaconf
def test_the_engine_section_is_found_and_the_ones_that_ask_for_something_else_are_named(write: Any) -> None:
    found = load(write("c.yaml", VERL))
    assert found.section == ACTOR
    assert found.others == ("critic.megatron",)  # ref is the actor's, by interpolation
    assert found.arguments is not None
    assert found.arguments.keys() == {"override_transformer_config", "context_parallel_size"}
    assert normalise({**found.arguments, "override_transformer_config": {}}) == {"use_flash_attn": True}
    assert found.arguments["override_transformer_config"]["recompute_modules"] == ["core_attn"]


@needs_omegaconf
@pytest.mark.parametrize(
    ("section", "flash"), [("critic.megatron", None), (ACTOR, True), ("actor_rollout_ref.ref.megatron", True)]
)
def test_a_section_can_be_named(write: Any, section: str, flash: bool | None) -> None:
    found = load(write("c.yaml", VERL), section=section)
    assert (found.section, found.others) == (section, ())
    assert found.arguments is not None
    assert found.arguments["override_transformer_config"].get("use_flash_attn") is flash


def test_a_section_that_is_no_engine_config_is_taken_as_it_is(write: Any) -> None:
    path = write("c.yaml", "mindspeed:\n  args:\n    use_flash_attn: true\n    tp_2d: false\nother: {x: 1}\n")
    assert load(path, section="mindspeed.args").arguments == {"use_flash_attn": True, "tp_2d": False}


def test_an_engine_config_at_the_top_needs_no_section(write: Any) -> None:
    found = load(write("c.yaml", "override_transformer_config: {use_flash_attn: true}\ncontext_parallel_size: 2\n"))
    assert found.section == ""
    assert normalise(found.arguments) == {"use_flash_attn": True, "context_parallel_size": 2}


def test_an_engine_config_without_overrides_is_found_by_its_other_keys(write: Any) -> None:
    text = "e:\n  context_parallel_size: 2\n  tensor_model_parallel_size: 1\n  use_mbridge: true\n"
    found = load(write("c.yaml", text))
    assert (found.section, found.arguments) == (
        "e",
        {"override_transformer_config": {}, "context_parallel_size": 2},
    )


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x=true", True),
        ("x=False", False),
        ("x=null", None),
        ("x=~", None),
        ("x=2", 2),
        ("x=0.5", 0.5),
        ("x=[1, 2]", [1, 2]),
        ('x={"a": 1}', {"a": 1}),
        ("x=flash", "flash"),
        ("x=none", "none"),
        ('x="2"', "2"),
        ("x=", ""),
        ("x=a=b", "a=b"),
        ("+x=1", 1),
    ],
)
def test_a_setting_is_read_as_yaml_reads_a_value(text: str, value: Any) -> None:
    found = load(settings=[text])
    assert found.arguments == {"x": value}
    assert type(found.arguments["x"]) is type(value)


@needs_omegaconf
def test_settings_reach_the_engine_config_where_verl_looks(write: Any) -> None:
    found = load(write("c.yaml", VERL), settings=["use-flash-attn=false", "context_parallel_size=4", "new=1"])
    assert found.arguments is not None
    assert found.arguments["context_parallel_size"] == 4
    overrides = found.arguments["override_transformer_config"]
    assert (overrides["use-flash-attn"], overrides["new"]) == (False, 1)
    assert "use_flash_attn" not in overrides


@needs_omegaconf
def test_a_dotted_setting_is_a_path_from_the_top_as_in_hydra(write: Any) -> None:
    path = write("c.yaml", VERL)
    settings = [f"+{ACTOR}.override_transformer_config.tp_2d=true", f"{ACTOR}.context_parallel_size=2"]
    for section in (ACTOR, "actor_rollout_ref.ref.megatron"):
        found = load(path, section=section, settings=settings)
        assert found.arguments is not None
        assert found.arguments["override_transformer_config"]["tp_2d"] is True
        assert found.arguments["context_parallel_size"] == 2
    words = ["python3", "-m", "verl.trainer.main_ppo", *settings, "--use-ascend-coc"]
    assert load(path, command_line=words).command_line == ("--use-ascend-coc",)
    assert load(path, command_line=words).arguments == load(path, settings=settings).arguments


# ---- command lines -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "--use-flash-attn --context-parallel-size 2",
        "pretrain_gpt.py --use-flash-attn --context-parallel-size 2",
        "torchrun --nproc_per_node 8 pretrain_gpt.py --use-flash-attn --context-parallel-size 2",
        "python -m pretrain --use-flash-attn --context-parallel-size 2",
        "pretrain --use-flash-attn --context-parallel-size 2",
    ],
)
def test_the_program_of_a_command_line_is_left_out(words: str) -> None:
    found = load(command_line=words.split())
    assert found == Config(None, ("--use-flash-attn", "--context-parallel-size", "2"), "the command line")


def test_nothing_at_all_is_the_defaults() -> None:
    assert load() == Config()


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tab.yaml", "a: 1\nb:\n\tc: 2\n", "line 3 is indented with a tab"),
        ("empty.yaml", "", "is empty"),
        ("comment.yaml", "# nothing\n", "is empty"),
        ("empty.json", " ", "is empty"),
        ("empty.toml", "", "is empty"),
        ("braces.json", "{}", "is empty"),
        ("list.yaml", "- a\n- b\n", "holds a list, not a mapping"),
        ("text.yaml", "hello\n", "holds a str, not a mapping"),
        ("number.json", "3", "holds a int, not a mapping"),
        ("bad.yaml", "a: [1, 2\nb: 3\n", "line 2, column 2"),
        ("bad.json", '{"a": }', "is not JSON: Expecting value: line 1"),
        ("bad.toml", "a = \n", "is not TOML: Invalid value"),
        ("c.txt", "a: 1", "ends in .txt; expected one of .yaml, .yml, .toml, .json"),
        ("none", "a: 1", "ends in nothing"),
        ("sections.yaml", "a: {b: 1}\nc: {d: 2}\n", "has no engine section"),
        ("hydra.yaml", "defaults:\n- actor\na: {b: 1}\n", "give the composed file"),
        ("date.toml", "a = 2024-01-01\n", "argument a: .* is a date. Write it as text"),
    ],
)
def test_a_file_with_a_fault_gives_one_message(write: Any, name: str, text: str, expected: str) -> None:
    found = message(write(name, text))
    assert re.search(expected, found)
    assert name in found or name.startswith("date")


@needs_omegaconf
def test_a_key_given_twice_is_refused(write: Any) -> None:
    assert "duplicate key" in message(write("c.yaml", "a: 1\na: 2\n"))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "none.yaml' cannot be read: No such file" in message(tmp_path / "none.yaml")
    (tmp_path / "d.yaml").mkdir()
    assert "d.yaml' cannot be read: Is a directory" in message(tmp_path / "d.yaml")
    (tmp_path / "b.yaml").write_bytes(b"a: \xff")
    assert "is not UTF-8" in message(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("actor_rollout_ref.actor.megatrn", f"Near paths: {ACTOR}"),
        ("zzz", f"Engine sections: {ACTOR}"),
        ("actor_rollout_ref.actor.strategy", "is str 'megatron', not a mapping"),
    ],
)
def test_a_wrong_section_path_names_the_right_one(write: Any, section: str, expected: str) -> None:
    found = message(write("c.yaml", VERL), section=section)
    assert expected in found
    assert section in found


@needs_omegaconf
def test_interpolations_that_do_not_resolve_and_missing_values_are_told(write: Any) -> None:
    text = "e:\n  override_transformer_config: {a: '${nowhere.b}'}\n  other: '${also.nowhere}'\n"
    assert "e.override_transformer_config.a is '${nowhere.b}', which does not resolve" in message(write("c.yaml", text))
    text = "e:\n  override_transformer_config:\n    a: ???\n"
    assert "e.override_transformer_config.a is '???'" in message(write("c.yaml", text))
    # A setting helps.
    found = load(write("c.yaml", text), settings=["e.override_transformer_config.a=1"])
    assert found.arguments == {"override_transformer_config": {"a": 1}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["use_flash_attn"], "is not key=value"),
        (["=1"], "is not key=value"),
        (["a b=1"], "is not key=value"),
        (["a.b=1"], "is a path into a file. Give the file with --config"),
    ],
)
def test_a_setting_with_a_fault(settings: list[str], expected: str) -> None:
    assert expected in message(settings=settings)


@needs_omegaconf
def test_a_setting_for_a_section_that_is_not_there(write: Any) -> None:
    found = message(write("c.yaml", VERL), settings=["actor_rollout_ref.actr.megatron.context_parallel_size=2"])
    assert "has no section 'actor_rollout_ref.actr.megatron'" in found
    assert ACTOR in found


def test_a_section_or_command_line_of_nothing() -> None:
    assert "is of no file" in message(section="a.b")
    assert "has no options" in message(command_line=["pretrain", "gpt"])


def test_without_yaml_the_message_says_what_to_install(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("yaml", "omegaconf") else real(name))
    assert "pip install pyyaml" in message(write("c.yaml", "a: 1\n"))
    assert load(write("c.json", '{"a": 1}')).arguments == {"a": 1}


def test_without_omegaconf_plain_yaml_is_read_and_interpolations_are_refused(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "omegaconf" else real(name))
    found = load(write("c.yaml", VERL.replace("${oc.select:data.seed,42}", "1")), section=ACTOR)
    assert found.arguments is not None
    assert found.arguments["override_transformer_config"]["use_flash_attn"] is True
    assert "pip install omegaconf" in message(write("c.yaml", VERL), section="actor_rollout_ref.ref.megatron")
