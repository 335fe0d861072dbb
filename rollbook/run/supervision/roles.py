"""Role name to process module: one explicit table. A module is imported only by the process that plays the role."""

ROLES: dict[str, str] = {
    "prepare": "rollbook.run.processes.prepare",
    "ledger": "rollbook.run.processes.ledger_server",
    "policy": "rollbook.run.processes.inference_server",
    "vllm": "rollbook.run.processes.vllm_server",
    "env": "rollbook.run.processes.env_server",
    "rollout": "rollbook.run.processes.rollout",
    "trainer": "rollbook.run.processes.trainer",
    "evaluation": "rollbook.run.processes.evaluation",
    "report": "rollbook.run.processes.report",
}
