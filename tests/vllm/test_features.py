"""The tap under each feature of the installed vLLM: every step equal to the scheduler. Run by ``make test-vllm``."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs these")

from tests.vllm.features import FEATURES, WAYS, NoSuchFeature, Outcome, run_feature

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FEATURES)
def test_every_step_equals_the_scheduler(tmp_path: Path, name: str, way: str) -> None:
    try:
        outcome = run_feature(FEATURES[name], tmp_path, way)
    except NoSuchFeature as error:
        pytest.skip(str(error))
    assert outcome == Outcome(outcome.steps, outcome.steps, (), (), 0 if FEATURES[name].certain else outcome.steps)
    assert outcome.steps > 50
