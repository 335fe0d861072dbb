"""A ten-line world around the ledger: weights with a lineage, a trainer that can die, and what a token's age truly is.

It knows nothing of effective versions. A set of weights is the chain of digests that led to it; the true version of a token in the
eyes of a trainer is how far the two chains agree. That is what the ledger's bound is held against.
"""

from dataclasses import dataclass, field

from rollbook.contracts.batch import AckReceipt, BatchManifest, EndOfRun
from rollbook.contracts.freshness import lag
from rollbook.contracts.policy import Publication
from tests.parts.ledger.run_driver import RunDriver

Chain = tuple[str, ...]
INITIAL: Chain = ("initial",)


def common_steps(one: Chain, other: Chain) -> int:
    """The last step at which both were the same weights."""
    same = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        same += 1
    return same - 1


@dataclass
class SimulatedRun:
    driver: RunDriver
    staleness_bound: int
    chain: Chain = INITIAL
    salt: str = ""
    """Kernels of the current trainer: another salt gives other weights from the same batch."""
    checkpoints: dict[int, Chain] = field(default_factory=lambda: {0: INITIAL})
    published: dict[int, Chain] = field(default_factory=dict)
    live: Publication | None = None
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Publications behind each stored group, -1 for unknown."""
    batches: dict[int, BatchManifest] = field(default_factory=dict)
    acknowledged: dict[int, str] = field(default_factory=dict)
    replay_until: int = 0
    end: EndOfRun | None = None

    @property
    def step(self) -> int:
        return len(self.chain) - 1

    def expect_an_end(self) -> None:
        """Forget an end that was only looked at by asking too far ahead."""
        self.end = None

    def take_over(self, *, checkpoint: int, salt: str) -> None:
        role = self.driver.take_role(checkpoint)
        self.chain, self.salt = self.checkpoints[checkpoint], salt
        self.replay_until = role.last_decided
        assert role.last_decided == max(self.batches, default=0)
        assert role.last_acknowledged == max(self.acknowledged, default=0)

    def decide(self, step: int) -> bool:
        """Ask for a batch; check that it is the same as ever, and if it is new, that it is fresh in truth."""
        decision = self.driver.decide(step)
        self.end = self.end or decision.end
        if decision.manifest is None:
            return False
        if step in self.batches:
            assert decision.manifest == self.batches[step], f"batch {step} changed"
            return True
        self.batches[step] = decision.manifest
        for entry in decision.manifest.entries:
            assert entry.group_id in self.tokens, f"{entry.group_id} was never accepted"
            trained = set(self.tokens[entry.group_id]) - set(entry.masked)
            assert trained, f"nothing of {entry.group_id} is trained"
            for publication in trained - {-1}:
                true_version = common_steps(self.published[publication], self.chain)
                # Deciding ahead: the weights the batch will meet extend the chain, so the agreement cannot shrink.
                assert lag(step=step, oldest_version=true_version) <= self.staleness_bound, (
                    f"{entry.group_id} is too old"
                )
            for publication in entry.masked:
                steps = len(self.published[publication]) - 1
                is_demoted = common_steps(self.published[publication], self.chain) < steps
                assert is_demoted or lag(step=step, oldest_version=steps) > self.staleness_bound, (
                    f"fresh tokens of {entry.group_id} are masked"
                )
        return True

    def train(self) -> bool:
        """Train the next batch, if there is one: weights change and are acknowledged."""
        step = self.step + 1
        if not self.decide(step):
            return False
        self.chain = (*self.chain, f"{self.chain[-1]}/{self.batches[step].digest[:6]}{self.salt}")
        receipt = self.driver.acknowledge(step, self.chain[-1])
        before = self.acknowledged.get(step)
        expected = AckReceipt.ACKNOWLEDGED
        if before is not None:
            expected = AckReceipt.REPEATED if before == self.chain[-1] else AckReceipt.DIVERGED
        assert receipt is expected
        self.acknowledged[step] = self.chain[-1]
        return True

    @property
    def may_publish(self) -> bool:
        return self.step >= self.replay_until and (self.live is None or self.step >= self.live.step)

    def publish(self) -> None:
        publication = self.driver.register(self.step, self.chain[-1])
        self.published[publication.id] = self.chain
        self.live = self.driver.publish(self.step, self.chain[-1])
        assert self.live == publication

    def checkpoint(self) -> None:
        self.checkpoints = {step: kept for step, kept in self.checkpoints.items() if step != self.step}
        self.checkpoints[self.step] = self.chain
        self.driver.checkpointed(self.step, oldest_kept=min(self.checkpoints))
