"""A drafter of another package: its class, an entry point, clear words when it is missing."""

import sys
from types import ModuleType

import pytest

from hunch import LLM, SamplingParams
from hunch.config import SpecConfig
from hunch.draft import Draft, Needs
from hunch.errors import ConfigError
from tiny_models import write_llama


class EchoDrafter:
    """Guesses that the last token comes again."""

    def __init__(self, options, path, context):
        self.num_nodes = int(options.get("num_nodes", 2))
        self.needs = Needs(max_nodes=self.num_nodes)

    def observe(self, step):
        pass

    def propose(self, rows):
        chains = []
        for row in rows.ids_R.tolist():
            length = min(self.num_nodes, int(rows.max_draft_X[row]))
            chains.append([int(rows.tokens_XL[row, rows.known_X[row] - 1])] * length)
        return Draft.chains(chains)

    def forget(self, rows):
        pass


@pytest.fixture
def package(monkeypatch):
    module = ModuleType("echo_package")
    module.EchoDrafter = EchoDrafter
    inner = ModuleType("echo_package.drafters")
    inner.EchoDrafter = EchoDrafter
    monkeypatch.setitem(sys.modules, "echo_package", module)
    monkeypatch.setitem(sys.modules, "echo_package.drafters", inner)


def test_a_class_drafts_and_changes_no_text(package, tmp_path):
    model = str(write_llama(tmp_path / "target"))
    sizes = {"max_num_seqs": 2, "max_model_len": 128, "kv_bytes": 4_000_000, "threads": 1}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    texts, drafted = [], []
    for speculate in ("off", "echo_package.drafters:EchoDrafter:num_nodes=3"):
        with LLM(model, speculate=speculate, **sizes) as llm:
            texts.append(llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids)
            drafted.append(llm.stats()["drafted"])
    assert texts[0] == texts[1]
    assert drafted[0] == 0 < drafted[1]


def test_how_it_is_written():
    spec = SpecConfig.parse("a.b:Own:PATH:key=1")
    assert (spec.method, spec.path, spec.options) == ("a.b:Own", "PATH", {"key": "1"})
    assert SpecConfig.parse("eagle:some.path").method == "eagle"


def test_a_module_need_not_be_in_a_package(package):
    spec = SpecConfig.parse("echo_package:EchoDrafter:num_nodes=3")
    assert (spec.method, spec.options) == ("echo_package:EchoDrafter", {"num_nodes": "3"})
    with pytest.raises(ConfigError, match=r"'eagel' is not one of .*did you mean 'eagle'"):
        SpecConfig.parse("eagel:Head")


def test_an_entry_point_is_a_name(monkeypatch):
    monkeypatch.setattr("hunch.registry._offered", lambda: {"echo": "echo_package:EchoDrafter"})
    assert SpecConfig.parse("echo").method == "echo"
    with pytest.raises(ConfigError, match=r"'ecko' is not one of .*echo.*did you mean 'echo'"):
        SpecConfig.parse("ecko")


def test_a_missing_one_is_explained(package, tmp_path):
    model = str(write_llama(tmp_path / "target"))
    with pytest.raises(ConfigError, match=r"No module named 'nobody'.*package.module:Class"):
        LLM(model, speculate="nobody.here:Drafter")
    with pytest.raises(ConfigError, match="has no attribute 'Missing'"):
        LLM(model, speculate="echo_package.drafters:Missing")
    with pytest.raises(ConfigError, match="name is empty"):
        LLM(model, speculate="")
