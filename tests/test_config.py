"""Reading settings: what is accepted, and the text of every refusal."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locojax import settings
from locojax.config import Config, load
from locojax.errors import ConfigError
from locojax.resolving import LEFT_OPEN, resolve


def write(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(*arguments: str, path: pathlib.Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, arguments)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_file_then_arguments_the_last_word_winning(tmp_path):
    path = write(tmp_path, '[rollout]\ngroup_size = 4\nstop = ["\\n\\n", "User:"]\n[optimizer]\nlearning_rate = 1\n')
    config = load(path, ["rollout.group_size=6", "rollout.group_size=16"])
    assert config.rollout.group_size == 16
    assert config.rollout.stop == ("\n\n", "User:")
    assert config.optimizer.learning_rate == 1.0 and isinstance(config.optimizer.learning_rate, float)
    assert config.run == Config().run


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("run.seed=7", "run.seed", 7),
        ("optimizer.learning_rate=3e-4", "optimizer.learning_rate", 3e-4),
        ("training.lora_mlp=false", "training.lora_mlp", False),
        ("loss.name=cispo", "loss.name", "cispo"),
        ("rollout.max_slots=auto", "rollout.max_slots", "auto"),
        ("rollout.max_slots=64", "rollout.max_slots", 64),
        ("rollout.stop=none", "rollout.stop", None),
        ("rollout.stop=a,b", "rollout.stop", ("a", "b")),
        ('rollout.stop=["\\n", "a,b"]', "rollout.stop", ("\n", "a,b")),
        ("data.template=Q: {question} = ", "data.template", "Q: {question} = "),
        ('data.template="{question}\\nA:"', "data.template", "{question}\nA:"),
        ("run.name=x=y", "run.name", "x=y"),
    ],
)
def test_argument_values_follow_the_settings_type(argument, key, value):
    assert settings.get(load(None, [argument]), key) == value


def test_unknown_key_in_a_file_names_the_line_and_the_nearest(tmp_path):
    path = write(tmp_path, "# a comment\n[rollout]\n\ngroup_sise = 4\n")
    assert refusal(path=path) == (
        f"Unknown setting 'rollout.group_sise' ({path}, line 4). The nearest is 'rollout.group_size'."
    )


def test_unknown_key_as_an_argument():
    assert refusal("group_size=4") == (
        "Unknown setting 'group_size' (argument 'group_size=4'). The nearest is 'rollout.group_size'."
    )
    assert refusal("zzz=4") == "Unknown setting 'zzz' (argument 'zzz=4'). `locojax train --help` lists every setting."
    assert "'optimizer' is a section, not a setting" in refusal("optimizer=adam")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["loss.icepop_low=0.5"], "loss.icepop_low is 0.5 and loss.icepop_high is None. Set both, or neither"),
        (["loss.icepop_low=2", "loss.icepop_high=1"], "loss.icepop_low (2) is above loss.icepop_high (1). Swap them"),
        (["loss.name=dro", "loss.normalise=completions"], "dro's quadratic term has one strength for all completions"),
    ],
)
def test_loss_settings_that_contradict_each_other(arguments, problem):
    assert problem in refusal(*arguments)


def test_wrong_type():
    assert refusal("rollout.group_size=four") == (
        "Setting 'rollout.group_size' has a value of the wrong type (argument 'rollout.group_size=four'). "
        "Got: 'four'. Expected: an integer."
    )
    assert "Got: 'grpo'. Expected: 'importance_sampling'" in refusal("loss.name=grpo")
    assert "Expected: an integer or 'auto'" in refusal("rollout.max_slots=auro")
    assert "The nearest is 'auto'" in refusal("rollout.max_slots=auro")
    assert "Got: '8.5'" in refusal("rollout.group_size=8.5")
    assert "Expected: true or false" in refusal("training.lora_mlp=yes")


@pytest.mark.parametrize("line", ["seed = true", 'seed = "7"', "seed = 7.0", "seed = [7]", "seed = 1979-05-27"])
def test_toml_types_are_not_coerced(tmp_path, line):
    assert "Expected: an integer" in refusal(path=write(tmp_path, f"[run]\n{line}\n"))


def test_out_of_range():
    assert refusal("rollout.top_p=0") == (
        "Setting 'rollout.top_p' is out of range (argument 'rollout.top_p=0'). Got: 0.0. Expected: above 0, at most 1."
    )
    assert "Expected: at least 1" in refusal("rollout.group_size=0")
    assert "Got: nan" in refusal("optimizer.learning_rate=nan")
    assert "Got: inf" in refusal("optimizer.learning_rate=inf")


def test_contradictions():
    assert refusal("rollout.group_size=1", "training.advantage=std") == (
        "Settings contradict each other: rollout.group_size is 1 and training.advantage is 'std': one "
        "completion has nothing to be compared with. Sample at least 2 completions a prompt."
    )
    assert "training.lora_rank is 0" in refusal("training.method=lora", "training.lora_rank=0")
    off = [f"training.lora_{part}=false" for part in ("attention", "mlp", "unembed")]
    assert "nothing would be trained" in refusal("training.method=lora", *off)
    assert "Choose k1, k2 or k3" in refusal("loss.kl_coefficient=0.1")
    assert "Set data.reward" in refusal("data.source=mine.jsonl")
    assert "room for a prompt" in refusal("model.max_context=64", "rollout.max_tokens=64")
    assert "A sub-step needs at least one prompt" in refusal("training.substeps=4", "run.prompts_per_step=2")
    assert "Make run.num_steps a multiple of run.passes" in refusal("run.num_steps=5", "run.passes=2")
    load(None, ["data.source=mine.jsonl", "data.reward=exact"])


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "none.toml"
    assert refusal(path=missing) == f"There is no configuration file '{missing}'. Check the path."
    broken = write(tmp_path, "[run]\nname = unquoted\n")
    assert f"{broken} is not valid TOML: Invalid value (at line 2, column 8)" in refusal(path=broken)
    assert "is not a setting" in refusal("--fast")


def test_every_setting_has_a_document_and_a_default_inside_its_own_range():
    for leaf in settings.leaves(Config):
        assert leaf.doc.endswith("."), leaf.key
        if leaf.default is not None:
            raw = list(leaf.default) if isinstance(leaf.default, tuple) else leaf.default
            assert (
                settings.get(settings.assign(Config(), [settings.Assignment(leaf.key, raw, "")]), leaf.key)
                == leaf.default
            )


@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    stops=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
    number=st.floats(0, 1e6),
)
def test_toml_round_trip(tmp_path_factory, text, stops, number):
    values = {"data.template": text, "rollout.stop": tuple(stops), "optimizer.learning_rate": number}
    config = settings.replace(Config(), values)
    path = write(tmp_path_factory.mktemp("toml"), settings.to_toml(config))
    assert load(path) == config


def test_resolve_leaves_open_what_it_says_and_changes_nothing_that_was_set(tmp_path):
    config = load(None, ["training.rows=3", "rollout.max_tokens=16"])
    for platform in ("cpu", "tpu", "gpu"):
        resolved = resolve(config, platform=platform, model_context=8192, longest_prompt=100)
        values = {leaf.key: settings.get(resolved, leaf.key) for leaf in settings.leaves(Config)}
        assert tuple(key for key, value in values.items() if value == "auto") == LEFT_OPEN
        assert resolved.training.rows == 3
        assert resolved.training.row_tokens >= 116
        assert resolved.rollout.dtype == resolved.training.compute_dtype
        assert resolve(resolved, platform=platform, model_context=8192, longest_prompt=100) == resolved
        assert load(write(tmp_path, settings.to_toml(resolved))) == resolved
    assert config.rollout.max_slots == "auto"
    fast = resolve(config, platform="cpu", model_context=8192, longest_prompt=9, auto_dtype="bfloat16")
    assert (fast.training.compute_dtype, fast.rollout.dtype) == ("bfloat16", "bfloat16")
    assert resolve(config, platform="cpu", model_context=64, longest_prompt=60).training.row_tokens == 256


def test_resolve_refuses_what_does_not_fit():
    config = load(None, ["model.max_context=4096"])
    with pytest.raises(ConfigError, match=r"longer than the model's own context. Got: 4096. Expected: at most 2048"):
        resolve(config, platform="cpu", model_context=2048, longest_prompt=10)
    with pytest.raises(ConfigError, match=r"'training.row_tokens' is too small .* Got: 32. Expected: at least 74"):
        resolve(load(None, ["training.row_tokens=32"]), platform="cpu", model_context=2048, longest_prompt=10)


def resolved_for(hosts: int, devices: int, *arguments: str, platform: str = "cpu") -> Config:
    return resolve(load(None, arguments), platform=platform, model_context=8192, longest_prompt=100,
                   num_hosts=hosts, num_devices=devices)  # fmt: skip


def test_resolve_knows_the_hosts():
    """Slots for a host's share of the prompts, and a mesh over all devices; a lone CPU's devices share its cores."""
    assert resolved_for(1, 4).training.mesh_fsdp == 1 and resolved_for(1, 4, platform="tpu").training.mesh_fsdp == 4
    assert resolved_for(2, 2).training.mesh_fsdp == 2
    assert resolved_for(2, 8, "training.mesh_tensor=2").training.mesh_fsdp == 4
    assert resolved_for(1, 4, "training.mesh_fsdp=2").training.mesh_fsdp == 2
    split = resolved_for(1, 8, "training.mesh_sequence=3", "training.mesh_tensor=2").training
    assert split.mesh_fsdp == 1 and split.row_tokens % (3 * 64) == 0
    slots = [resolved_for(hosts, hosts, "run.prompts_per_step=9").rollout.max_slots for hosts in (1, 2, 4)]
    assert slots == [128, 64, 32]


@pytest.mark.parametrize(
    ("hosts", "devices", "argument", "text"),
    [
        (1, 4, "training.mesh_fsdp=8", "Got: 4 devices on 1 host. Expected: at least 8."),
        (2, 4, "training.mesh_fsdp=2", "Got: 4 devices on 2 hosts. Expected: 2 devices."),
        (2, 4, "training.mesh_tensor=3", "A mesh of training.mesh_fsdp 1 x training.mesh_tensor 3 does not fit"),
        (1, 4, "training.mesh_sequence=8", "mesh_fsdp 1 x training.mesh_sequence 8 x training.mesh_tensor 1 does not"),
        (1, 4, "training.mesh_sequence=8", "choose a mesh_tensor x mesh_sequence that divides a host's devices"),
    ],
)
def test_a_mesh_that_does_not_fit(hosts, devices, argument, text):
    with pytest.raises(ConfigError) as caught:
        resolved_for(hosts, devices, argument)
    assert text in str(caught.value)


def test_rows_are_divided_by_the_sequence_axis():
    text = "'training.row_tokens' can't be divided by training.mesh_sequence 3. Got: 512. Expected: .* 3, as 513"
    with pytest.raises(ConfigError, match=text):
        resolved_for(1, 3, "training.row_tokens=512", "training.mesh_sequence=3")
