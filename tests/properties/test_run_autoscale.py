"""The rule of the autoscaler: bounds, hysteresis, one change at a time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.run.config.cluster import AutoscaleConfig
from rollbook.run.supervision.scale import LoadSample, Scale, ScaleFinding, Streak, decide, find

HOLD_S = 60.0
STARVED = LoadSample(trainer_wait=0.8, gate_free=4, queued_batches=0.2, policy_load=3.0, num_policies=2)
FED = LoadSample(trainer_wait=0.01, gate_free=0, queued_batches=2.0, policy_load=3.0, num_policies=2)


@st.composite
def configs(draw: st.DrawFn) -> AutoscaleConfig:
    max_policy, max_rollout = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    return AutoscaleConfig(
        max_policy=max_policy,
        min_policy=draw(st.integers(0, max_policy)),
        max_rollout=max_rollout,
        min_rollout=draw(st.integers(0, max_rollout)),
        hold_s=HOLD_S,
    )


observations = st.builds(
    LoadSample,
    trainer_wait=st.floats(0, 1),
    gate_free=st.integers(0, 8),
    queued_batches=st.floats(0, 4),
    policy_load=st.floats(0, 200),
    num_policies=st.integers(0, 5),
)
scales = st.builds(Scale, policy=st.integers(0, 6), rollout=st.integers(0, 6), env=st.integers(0, 2))


def play(
    config: AutoscaleConfig, scale: Scale, seen: list[tuple[float, LoadSample]]
) -> list[tuple[float, Scale, Scale]]:
    """Every change of a number after the first, which only applies the bounds."""
    now, streak, changes = 0.0, Streak(), []
    scale, streak = decide(config, scale, seen[0][1], streak, now=now)
    for after_s, observation in seen:
        now += after_s
        before = scale
        scale, streak = decide(config, scale, observation, streak, now=now)
        if scale != before:
            changes.append((now, before, scale))
    return changes


steps = st.lists(st.tuples(st.floats(0.1, 40), observations), min_size=1, max_size=40)


@settings(max_examples=50)
@given(config=configs(), scale=scales, seen=steps)
def test_numbers_stay_in_their_bounds_and_change_by_one_after_the_hold(
    config: AutoscaleConfig, scale: Scale, seen: list[tuple[float, LoadSample]]
) -> None:
    last = 0.0
    for now, before, after in play(config, scale, seen):
        assert abs(after.policy - before.policy) + abs(after.rollout - before.rollout) == 1
        assert after.env == before.env
        assert now - last >= HOLD_S
        last = now
        for role in ("policy", "rollout"):
            least, most = getattr(config, f"min_{role}"), getattr(config, f"max_{role}")
            if most == 0:
                assert after.of(role) == scale.of(role)
            else:
                assert least <= after.of(role) <= most


@settings(max_examples=50)
@given(config=configs(), scale=scales, observation=observations)
def test_a_constant_observation_moves_each_number_in_one_direction_and_then_stops(
    config: AutoscaleConfig, scale: Scale, observation: LoadSample
) -> None:
    changes = play(config, scale, [(HOLD_S, observation)] * 60)
    directions = {
        role: {after.of(role) - before.of(role) for _, before, after in changes} - {0} for role in ("policy", "rollout")
    }
    assert all(len(found) <= 1 for found in directions.values())
    # Each change takes two observations: the finding, and the end of its hold.
    assert len(changes) <= 12


@given(seen=st.lists(st.sampled_from([STARVED, FED]), min_size=2, max_size=40).filter(lambda s: len(set(s)) == 2))
def test_findings_that_alternate_faster_than_the_hold_change_nothing(seen: list[LoadSample]) -> None:
    config = AutoscaleConfig(max_policy=4, max_rollout=4, hold_s=HOLD_S)
    timed = [(HOLD_S / 100, observation) for observation in seen]
    assert play(config, Scale(policy=1, rollout=1), timed) == []


def test_what_is_missing_decides_what_is_added() -> None:
    config, scale = AutoscaleConfig(max_policy=2, max_rollout=2), Scale(policy=1, rollout=1)
    busy = LoadSample(trainer_wait=0.8, gate_free=4, queued_batches=0.0, policy_load=100.0, num_policies=2)
    assert find(config, scale, STARVED) is ScaleFinding.FEW_DISPATCHERS
    assert find(config, scale, busy) is ScaleFinding.FEW_POLICIES
    assert find(config, scale, FED) is ScaleFinding.MANY_DISPATCHERS
    assert find(config, Scale(policy=1), FED) is ScaleFinding.MANY_POLICIES
    # The gate is closed although the trainer waits: more dispatchers would get no groups.
    closed = LoadSample(trainer_wait=0.8, gate_free=0, queued_batches=0.0, policy_load=3.0, num_policies=2)
    assert find(config, scale, closed) is ScaleFinding.BALANCED
